"""Recurrent language models: a stack of LSTMs (Zaremba et al., 2014).

Shape suffixes: B batch, T tokens, C channels.
"""

from torch import Tensor, nn

from .synthetic import Parts, classification_loss, token_batches


class _Recurrent(nn.Module):
    """One LSTM over all tokens; its last state is dropped."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels, channels, batch_first=True)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.lstm(x_BTC)[0]
        return out


class LSTMLanguageModel(nn.Module):
    """Input token ids ``[B, T]``, output next-token logits ``[B, T, vocabulary]``.

    One module for each LSTM of the stack, so that a pipeline can be cut between them.
    """

    def __init__(self, *, vocabulary: int, depth: int, channels: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, channels)
        self.stack = nn.Sequential(*[_Recurrent(channels) for _ in range(depth)])
        self.head = nn.Linear(channels, vocabulary)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Score the next token at each position."""
        logits_BTV: Tensor = self.head(self.stack(self.tokens(ids_BT)))
        return logits_BTV


def lstm() -> Parts:
    """Three LSTMs of 128 channels, 1,024 words, 32 tokens a sample; 659,456 parameters."""
    model = LSTMLanguageModel(vocabulary=1024, depth=3, channels=128)
    return model, token_batches(32, 1024), classification_loss
