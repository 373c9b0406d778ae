"""Trainings under parallel plans. A script for the launcher, not a test.

Usage: tensor_cases.py FOLDER NUMBER=CASE...: each case trains under FOLDER/NUMBER.json, one after
another in the same processes; every worker writes what came out.
"""

import math
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.profilers.zoo.models import GPT
from hetflow.runtime.checkpoints.saving import OpenedFolders
from hetflow.runtime.pipeline import optimizer as pipeline_optimizer
from hetflow.runtime.pipeline import replica_sums
from hetflow.runtime.tensor.operators import (
    TensorGroup,
    column_linear,
    joined_linear,
    row_linear,
    sharded_dropout,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)
from hetflow.runtime.tensor.roles import ParameterCut
from hetflow.schema.errors import HetflowError

GLOBAL_BATCH_SIZE, NUM_SAMPLES, EPOCHS, VOCABULARY, TOKENS = 8, 12, 2, 18, 6


def zoo():
    return GPT(vocabulary=VOCABULARY, max_tokens=TOKENS, depth=2, num_heads=4, channels=16)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def llama_of_logits():
    model = llama()
    hf.tensor_parallel(model, {"lm_head": "logits"}, known=True)
    return model


def gpt2(dropout=0.0, attention="sdpa"):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY - 1, n_positions=TOKENS, n_embd=16, n_layer=2, n_head=4,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def dropping():
    """The zoo's GPT with dropout of hidden layers, of attention weights and of residuals."""
    model = zoo()
    for block in model.blocks:
        block.attention.forward = partial(drop_weights, block.attention)
        up, activation, down = block.feed_forward
        block.feed_forward = nn.Sequential(up, nn.Sequential(activation, nn.Dropout(0.2)), down)
        block.norms[1] = nn.Sequential(block.norms[1], nn.Dropout(0.1))
    return model


def drop_weights(attention, x):
    qkv = attention.project_in(x)
    q, k, v = qkv.view(*x.shape[:2], 3, -1, attention.head_channels).permute(2, 0, 3, 1, 4)
    made = functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=0.3 if attention.training else 0.0
    )
    return attention.project_out(made.transpose(1, 2).flatten(2))


def sized():
    """The zoo's GPT whose attention reads its number of heads, as most people's does."""
    model = zoo()
    for block in model.blocks:
        block.attention.heads_here = 4
        block.attention.forward = partial(attend_by_heads, block.attention)
    hf.tensor_parallel(model, {}, sizes={"blocks.*.attention": ["heads_here"]}, known=True)
    return model


def attend_by_heads(attention, x):
    qkv = attention.project_in(x)
    fused = qkv.view(x.size(0), x.size(1), 3, attention.heads_here, -1)
    q, k, v = fused.permute(2, 0, 3, 1, 4)
    made = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attention.project_out(made.transpose(1, 2).flatten(2))


def qwen():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=TOKENS, rotary_pct=0.5,
        hidden_dropout=0.0, attention_dropout=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=TOKENS, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def vit():
    """Each token is a patch of one pixel; the hidden states of patches are the logits."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=20, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        image_size=(2, TOKENS // 2), patch_size=1, num_channels=1, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return ViTModel(config, add_pooling_layer=False)


MODELS = {
    "zoo": zoo, "llama": llama, "gpt2": gpt2, "qwen": qwen, "dropping": dropping,
    "gpt2-drop": partial(gpt2, 0.2), "gpt2-eager": partial(gpt2, 0.2, "eager"),
    "llama-logits": llama_of_logits, "sized": sized, "bert": bert, "neox": neox,
    "vit": vit,
}  # fmt: skip


def grouped(parameters):
    """Matrices decay, vectors do not."""
    held = list(parameters)
    decaying = {"params": [p for p in held if p.dim() > 1], "weight_decay": 0.1}
    others = {"params": [p for p in held if p.dim() == 1], "weight_decay": 0.0, "lr": 0.01}
    return torch.optim.AdamW([decaying, others], lr=0.02)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.02),
    "groups": grouped,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}


def data():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY - 1, (NUM_SAMPLES, TOKENS + 1), generator=generator)
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def build(name):
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # the first worker's values are taken
    return MODELS[name]().double()


def logits_of(model, ids):
    if isinstance(model, GPT | nn.Sequential):
        return model(ids)
    if model.main_input_name == "pixel_values":
        pixels = ids.view(-1, 1, 2, TOKENS // 2).double() / VOCABULARY
        return model(pixel_values=pixels).last_hidden_state[:, 1:]
    return model(input_ids=ids).logits


def train(case):
    """``model:optimizer:options``, options out of clip, inf, unseen; save=DIR and load=DIR.

    ``save`` leaves a checkpoint behind the first epoch; ``load`` goes on from a copy of it.
    ``unseen`` evaluates nothing: an exported model would be exported once more for that.
    """
    name, kind, options = case.split(":")
    checkpoints = options.partition("=")[2]
    os.environ.pop("HETFLOW_CHECKPOINT", None)
    OpenedFolders.jobs = 0  # each case is a script of its own
    if checkpoints:
        os.environ["HETFLOW_CHECKPOINT"] = checkpoints
    replica_sums.LEAST_BUCKET_BYTES = pipeline_optimizer.BUCKET_BYTES = 3000
    model = build(name)
    optimizer = OPTIMIZERS[kind](model.parameters())
    job = hf.prepare(model, optimizer, seed=3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if kind == "groups" else None
    loader, losses, norms = DataLoader(data(), batch_size=GLOBAL_BATCH_SIZE, shuffle=True), [], []
    order = math.inf if "inf" in options else 2.0

    def loss_of(ids, targets):
        logits = logits_of(model, ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaled" in options)
    for _ in range(EPOCHS):
        for batch in job.batches(loader):
            losses.append(float(job.backward(loss_of, batch, scaler=scaler)))
            scaler.unscale_(optimizer)
            if "clip" in options:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)))
            scaler.step(optimizer)
            scaler.update()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            stored = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads}
            if "carry" not in options or len(losses) % 2 == 0:
                optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        if "unseen" not in options:
            with job.evaluation() as whole:
                losses.append(float(logits_of(whole, data().tensors[0]).square().sum()))
        if "save" in options:
            job.checkpoint()
            break
    held = sum(p.numel() for p in model.parameters())
    kept = sum(
        value.nbytes
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    job.finish()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {
        "state": state, "losses": losses, "norms": norms, "held": held, "kept": kept,
        "gradients": sum(stored.values()),
    }  # fmt: skip


def layers():
    """How far each layer of a group is from the whole layer: outputs and gradients, float64."""
    torch.distributed.init_process_group("gloo")
    rank, degree = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group = TensorGroup(degree, rank, tuple(range(degree)), torch.distributed.group.WORLD)
    torch.manual_seed(4)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    def leaf(value):
        return value.clone().requires_grad_()

    found = {}

    def compare(name, whole_of, own_of, x, weights, cuts):
        """``weights`` and the input must get the whole layer's gradients, cut where it is."""
        whole_x, own_x = (leaf(x), leaf(x)) if x.is_floating_point() else (x, x)
        whole = [leaf(weight) for weight in weights]
        own = [
            leaf(weight if cut is None else cut.own(weight, rank, degree))
            for weight, cut in zip(weights, cuts, strict=True)
        ]
        expected, answer = whole_of(whole_x, *whole), own_of(own_x, *own)
        torch.manual_seed(5)
        direction = torch.randn_like(expected)
        (expected * direction).sum().backward()
        (answer * direction).sum().backward()
        errors = [answer - expected]
        errors += [own_x.grad - whole_x.grad] if x.is_floating_point() else []
        for one, other, cut in zip(own, whole, cuts, strict=True):
            grad = other.grad if cut is None else cut.own(other.grad, rank, degree)
            errors.append(one.grad - grad)
        found[name] = max(float(error.abs().max()) for error in errors)

    def mlp(x, up, bias, down, more):
        return functional.linear(torch.tanh(functional.linear(x, up, bias)), down, more)

    def own_mlp(x, up, bias, down, more):
        return row_linear(torch.tanh(column_linear(x, up, bias, group)), down, more, group)

    weights = [drawn(12, 6), drawn(12), drawn(6, 12), drawn(6)]
    cuts = [ParameterCut(0), ParameterCut(0), ParameterCut(1), None]
    compare("column, row", mlp, own_mlp, drawn(3, 5, 6), weights, cuts)

    def attend(x, qkv, bias, out):
        q, k, v = functional.linear(x, qkv, bias).view(3, 5, 3, 6, 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.linear(mixed.transpose(1, 2).reshape(3, 5, -1), out)

    def own_attend(x, qkv, bias, out):
        made = column_linear(x, qkv, bias, group).view(3, 5, 3, -1, 2)
        q, k, v = made.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return row_linear(mixed.transpose(1, 2).reshape(3, 5, -1), out, None, group)

    weights, cuts = (
        [drawn(36, 12), drawn(36), drawn(12, 12)],
        [ParameterCut(0, 3), ParameterCut(0, 3), ParameterCut(1)],
    )
    compare("attention", attend, own_attend, drawn(3, 5, 12), weights, cuts)

    ids = torch.randint(11, (3, 5))
    compare(
        "embedding",
        lambda x, w: functional.embedding(x, w, 7),
        lambda x, w: vocabulary_embedding(x, w, group, vocabulary=11, padding_idx=7),
        ids, [drawn(11, 6)], [ParameterCut(0)],
    )  # fmt: skip
    compare(
        "output",
        functional.linear,
        lambda x, w, b: joined_linear(x, w, b, group, 11),
        drawn(3, 5, 6), [drawn(11, 6), drawn(11)], [ParameterCut(0), ParameterCut(0)],
    )  # fmt: skip
    targets = ids.clone().masked_fill(ids == 3, -100)
    compare(
        "cross-entropy",
        lambda x, w: functional.cross_entropy((x @ w.t()).flatten(0, 1), targets.flatten()),
        lambda x, w: vocabulary_cross_entropy(
            column_linear(x, w, None, group), targets, group, vocabulary=11
        ),
        drawn(3, 5, 6) * 30, [drawn(11, 6)], [ParameterCut(0)],
    )  # fmt: skip

    def dropped(x, dim):
        torch.manual_seed(6)
        own = x.tensor_split(degree, dim)[rank]
        return sharded_dropout(own, 0.4, group, dim=dim)

    x, errors = drawn(4, 6, 12), []
    for dim in (1, 2):
        torch.manual_seed(6)
        whole = functional.dropout(x, 0.4).tensor_split(degree, dim)[rank]
        errors.append(float((dropped(x, dim) - whole).abs().max()))
    found["dropout"] = max(errors)
    torch.distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    folder, results = Path(sys.argv[1]), {}
    for case in sys.argv[2:]:
        number, text = case.split("=", 1)
        os.environ["HETFLOW_PLAN"] = str(folder / f"{number}.json")
        try:
            results[number] = layers() if text == "layers" else train(text)
        except HetflowError as error:
            results[number] = {"error": f"{error} ({error.hint})"}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")
