"""What a real slurmdbd had of ten jobs on the nodes of ``tests/engines``."""

# Slurm 22.05.8: sacct --allocations --duplicates --parsable2, and some lines of steps.
LOG = """\
JobID|JobName|State|Submit|Start|End|AllocTRES
1|a|b c's|COMPLETED|2026-11-23T03:11:15|2026-11-23T03:11:15|2026-11-23T03:11:18|billing=1,cpu=1,gres/gpu:cpu_fast=2,gres/gpu=2,node=1
2|plain|COMPLETED|2026-11-23T03:11:15|2026-11-23T03:11:15|2026-11-23T03:11:18|billing=1,cpu=1,gres/gpu=1,node=1
3+0|mixed|COMPLETED|2026-11-23T03:11:15|2026-11-23T03:11:18|2026-11-23T03:11:20|billing=1,cpu=1,gres/gpu:cpu_fast=1,gres/gpu=1,node=1
3+1|mixed|COMPLETED|2026-11-23T03:11:15|2026-11-23T03:11:18|2026-11-23T03:11:20|billing=1,cpu=1,gres/gpu=1,node=1
6|no gpu|COMPLETED|2026-11-23T03:11:15|2026-11-23T03:11:15|2026-11-23T03:11:18|billing=1,cpu=1,node=1
7|again|REQUEUED|2026-11-23T03:11:15|2026-11-23T03:11:15|2026-11-23T03:11:24|billing=1,cpu=1,gres/gpu=1,node=1
5_0|array|COMPLETED|2026-11-23T03:11:15|2026-11-23T03:11:19|2026-11-23T03:11:21|billing=1,cpu=1,gres/gpu:cpu_fast=1,gres/gpu=1,node=1
5_1|array|COMPLETED|2026-11-23T03:11:15|2026-11-23T03:11:20|2026-11-23T03:11:22|billing=1,cpu=1,gres/gpu:cpu_fast=1,gres/gpu=1,node=1
7|again|COMPLETED|2026-11-23T03:11:24|2026-11-23T03:11:35|2026-11-23T03:11:37|billing=1,cpu=1,gres/gpu=1,node=1
9|killed|CANCELLED by 0|2026-11-23T03:11:24|2026-11-23T03:11:24|2026-11-23T03:11:24|
1.batch|batch|COMPLETED|2026-11-23T03:11:15|2026-11-23T03:11:15|2026-11-23T03:11:18|cpu=1,gres/gpu:cpu_fast=2,gres/gpu=2,mem=0,node=1
1.0|sleep|COMPLETED|2026-11-23T03:11:16|2026-11-23T03:11:16|2026-11-23T03:11:18|cpu=1,gres/gpu:cpu_fast=2,gres/gpu=2,mem=0,node=1
3+0.0|sleep|COMPLETED|2026-11-23T03:11:19|2026-11-23T03:11:19|2026-11-23T03:11:20|cpu=1,gres/gpu:cpu_fast=1,gres/gpu=1,mem=0,node=1
"""  # noqa: E501
