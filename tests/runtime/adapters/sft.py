"""trl's SFTTrainer: a packed corpus, prompts whose completions alone count, and LoRA of both."""

import json
import sys

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

answer, folder, kind = sys.argv[1:4]
set_seed(1)
words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(61))]
tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config).double()
drawn = torch.Generator().manual_seed(0)


def text(shortest, longest):
    length = int(torch.randint(shortest, longest, (1,), generator=drawn))
    return " ".join(f"w{int(n)}" for n in torch.randint(0, 61, (length,), generator=drawn))


if "packing" in kind:
    data = Dataset.from_dict({"text": [text(4, 16) for _ in range(150)]})
else:
    rows = [{"prompt": text(2, 6), "completion": " " + text(3, 9)} for _ in range(110)]
    data = Dataset.from_list(rows)
arguments = SFTConfig(
    folder,
    max_length=16,
    packing="packing" in kind,
    packing_strategy="bfd" if "whole" in kind else "wrapped",
    per_device_train_batch_size=32,
    per_device_eval_batch_size=20,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=1e-2,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
    disable_tqdm=True,
    gradient_checkpointing=False,
    bf16=False,
)
lora = LoraConfig(r=4, lora_dropout=0, target_modules=["q_proj", "v_proj"])
trainer = SFTTrainer(
    model,
    arguments,
    train_dataset=data,
    eval_dataset=data.select(range(30)),
    processing_class=tokenizer,
    peft_config=lora if "lora" in kind else None,
)
trainer.train(resume_from_checkpoint=sys.argv[4] if len(sys.argv) > 4 else None)
if trainer.is_world_process_zero():
    names = ("loss", "grad_norm", "eval_loss", "num_tokens", "mean_token_accuracy")
    # Before, trl takes the mean of the workers' entropies, whatever their shares are.
    names += ("entropy",) if int(trl.__version__.split(".")[0]) else ()
    names += tuple(f"eval_{name}" for name in names)
    logs = [{n: e[n] for n in names if n in e} for e in trainer.state.log_history]
    trained = [p.tolist() for p in trainer.model.parameters() if p.requires_grad]
    with open(answer, "w") as stream:
        json.dump({"logs": logs, "parameters": trained}, stream)
