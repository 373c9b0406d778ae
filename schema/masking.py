"""Hide what looks like a secret in a command line before it is written to a file.

Secrets are recognised by the names of options and settings, and by the formats of known keys.
Some harmless values are hidden too, and a secret with neither a telling name nor a known format
is not found.
"""

import re
from collections.abc import Sequence

MASK = "***"

_SECRET_WORDS = frozenset(
    "secret password passwd pwd passphrase apikey credential credentials auth bearer".split()
)
# "key" alone has many meanings (--num-key-value-heads); after one of these words it is a secret.
_BEFORE_KEY = frozenset("api access secret private signing encryption account storage".split())
# A "token" after one of these words belongs to a vocabulary, not an account: --pad-token "<pad>".
_BEFORE_TOKEN = frozenset("pad eos bos unk sep cls mask image start end stop special next".split())
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_SETTING = re.compile(r"(?s)^([-+~]*[A-Za-z_][\w.-]*)=(.+)$")
_URL_USER = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://[^\s/@:]*):[^\s/@]+@")
_QUERY = re.compile(r"([?&])([\w.-]+)=([^&#\s]+)")
_PAIR = re.compile(r"""(["']?)([A-Za-z_][\w-]*)\1(\s*:\s*)("[^"]*"|'[^']*'|[^"',\s{}\[\]]+)""")
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}|xox[abposr]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{30,}|nvapi-[A-Za-z0-9_-]{16,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_PRIVATE_KEY = re.compile(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*")


def mask(arguments: Sequence[str]) -> list[str]:
    """Replace the secrets in the arguments of a command by ``***``; keeps their number and order.

    ``--api-key X``, ``--api-key=X``, ``wandb.api_key=X``, ``{"password": "X"}``, user:X@host in a
    URL, signed URLs, and keys known by their form (Hugging Face, OpenAI, GitHub, GitLab, Slack,
    AWS, Google, JSON web tokens, private keys).
    """
    masked, hides_next = [], False
    for argument in arguments:
        if hides_next and not argument.startswith("--"):
            masked.append(MASK)
            hides_next = False
            continue
        masked.append(_masked(argument))
        hides_next = argument.startswith("-") and names_a_secret(argument)
    return masked


def names_a_secret(name: str) -> bool:
    """Whether an option, setting or key with this name holds a secret."""
    last = re.split(r"[./]", name)[-1]
    words = [word.lower() for word in _WORD.findall(last)]
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return before not in _BEFORE_TOKEN
    if words[-1] == "key":
        return before in _BEFORE_KEY
    return words[-1] in _SECRET_WORDS or "secret" in words[:-1] and words[-1] in ("id", "value")


def _masked(argument: str) -> str:
    setting = _SETTING.match(argument)
    if setting and names_a_secret(setting[1]):
        return f"{setting[1]}={MASK}"
    text = _PRIVATE_KEY.sub(MASK, argument)
    text = _URL_USER.sub(rf"\1:{MASK}@", text)
    text = _QUERY.sub(_without_value, text)
    text = _PAIR.sub(_without_pair, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    return _FORMS.sub(MASK, text)


def _without_value(match: re.Match[str]) -> str:
    signs = match[2].lower().endswith(("signature", "sig", "key", "credential"))
    hidden = MASK if signs or names_a_secret(match[2]) else match[3]
    return f"{match[1]}{match[2]}={hidden}"


def _without_pair(match: re.Match[str]) -> str:
    if not names_a_secret(match[2]):
        return match[0]
    quote = match[4][0] if match[4][0] in "\"'" else ""
    return f"{match[1]}{match[2]}{match[1]}{match[3]}{quote}{MASK}{quote}"
