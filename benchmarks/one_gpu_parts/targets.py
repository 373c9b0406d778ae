"""Models of usual sizes, as people train them: factories for `hetflow profile FILE:NAME`."""

import functools

import torch
import transformers
from torch.nn import functional
from truth_parts.workloads import Samples

from hetflow.profilers.zoo.models import ResNet, image_batches, token_batches

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)


def _trained(model, make_batch, optimizer, precision, *, compiled=False):
    """As a factory answers. Images in 16 bits lie in channels_last."""
    called = torch.compile(model) if compiled else model
    is_last = precision is not None and make_batch(1)[0].dim() == 4
    if is_last:
        model.to(memory_format=torch.channels_last)

    def loss(_, batch):
        inputs, labels = batch
        if is_last:
            inputs = inputs.to(memory_format=torch.channels_last)
        with torch.autocast(inputs.device.type, precision, enabled=precision is not None):
            answer = called(inputs)
        answer = getattr(answer, "logits", answer)
        return functional.cross_entropy(answer.flatten(0, -2).float(), labels.flatten())

    return model, make_batch, loss, optimizer, Samples(make_batch)


def _resnet50(precision, **how):
    model = ResNet((3, 4, 6, 3), bottleneck=True)
    return _trained(model, image_batches(3, 224, 1000), SGD, precision, **how)


def _gpt2(precision, **how):
    config = transformers.GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    return _trained(model, token_batches(1024, 50257), ADAMW, precision, **how)


def resnet50():
    """ResNet-50, 32 bits, convolutions in TF32 as torch has them."""
    return _resnet50(None)


def resnet50_bf16():
    """ResNet-50 under autocast, channels_last."""
    return _resnet50(torch.bfloat16)


def resnet50_bf16_compiled():
    """The same, compiled."""
    return _resnet50(torch.bfloat16, compiled=True)


def gpt2():
    """GPT-2 of 124 million parameters, 1024 tokens, 32 bits without TF32."""
    return _gpt2(None)


def gpt2_bf16():
    """GPT-2 under autocast."""
    return _gpt2(torch.bfloat16)


def gpt2_bf16_compiled():
    """The same, compiled."""
    return _gpt2(torch.bfloat16, compiled=True)


def vit_bf16():
    """ViT-B/16 under autocast."""
    model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
    return _trained(model, image_batches(3, 224, 1000), ADAMW, torch.bfloat16)


def convnext_bf16():
    """ConvNeXt-T under autocast, channels_last."""
    config = transformers.ConvNextConfig(num_labels=1000)
    model = transformers.ConvNextForImageClassification(config)
    return _trained(model, image_batches(3, 224, 1000), ADAMW, torch.bfloat16)


def bert_large_bf16():
    """BERT-large, 128 tokens, with its dropout, under autocast."""
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    model = transformers.BertForMaskedLM(config)
    return _trained(model, token_batches(128, 30522), ADAMW, torch.bfloat16)


def llama1b_bf16():
    """Llama's layers at the width and depth of TinyLlama, 2048 tokens, under autocast."""
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return _trained(model, token_batches(2048, 32000), ADAMW, torch.bfloat16)
