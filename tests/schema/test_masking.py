"""Secrets of a command line do not come into a file."""

import pytest

from hetflow.schema.masking import MASK, mask

HF = "hf_" + "a1B2" * 8
AWS = "AKIA" + "ABCDEFGH" * 2


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (["--token", "abc"], ["--token", MASK]),
        (["--hf-token=abc"], [f"--hf-token={MASK}"]),
        (["--api-key", "abc", "--lr", "0.1"], ["--api-key", MASK, "--lr", "0.1"]),
        (["--api_key=abc"], [f"--api_key={MASK}"]),
        (["--apiKey", "-abc"], ["--apiKey", MASK]),
        (["-password", "abc"], ["-password", MASK]),
        (["--password", "--epochs", "3"], ["--password", "--epochs", "3"]),
        (["--aws-secret-access-key", "a/b+c"], ["--aws-secret-access-key", MASK]),
        (["--client-secret-value=x"], [f"--client-secret-value={MASK}"]),
        (["wandb.api_key=abc", "+db.pwd=x"], [f"wandb.api_key={MASK}", f"+db.pwd={MASK}"]),
        (["HF_TOKEN=abc"], [f"HF_TOKEN={MASK}"]),
        ([HF, AWS], [MASK, MASK]),
        ([f"--note=key {HF} here"], [f"--note=key {MASK} here"]),
        (["--url", "s3://me:pass@host/x"], ["--url", f"s3://me:{MASK}@host/x"]),
        (["postgres://:pass@host"], [f"postgres://:{MASK}@host"]),
        (
            ["https://h/x?part=1&X-Amz-Signature=ab&sig=c"],
            [f"https://h/x?part=1&X-Amz-Signature={MASK}&sig={MASK}"],
        ),
        (['{"user": "me", "password": "x y"}'], [f'{{"user": "me", "password": "{MASK}"}}']),
        (["{api_key: abc, n: 3}"], [f"{{api_key: {MASK}, n: 3}}"]),
        (["Authorization: Bearer abcdefgh1234"], [f"Authorization: Bearer {MASK}"]),
        (["eyJhbGciOiJI.eyJzdWIiOiIx.c2ln"], [MASK]),
        (["-----BEGIN RSA PRIVATE KEY-----\nabc"], [MASK]),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_hidden(given: list[str], written: list[str]) -> None:
    assert mask(given) == written
    assert mask(written) == written


@pytest.mark.parametrize(
    "argument",
    [
        "train.py",
        "--max-tokens=100",
        "--pad-token=<pad>",
        "--num-key-value-heads=8",
        "--tokenizer=gpt2",
        "--author=me",
        "--token-file=/run/secrets",
        "s3://bucket/key",
        "ssh://git@host/path",
        "http://host:8080/a@b",
        "a: b",
        '{"lr": 0.1, "key": "value"}',
        "$(touch marker)",
        "",
    ],
)
def test_other_arguments_stay_as_they_are(argument: str) -> None:
    assert mask([argument, "next"]) == [argument, "next"]
