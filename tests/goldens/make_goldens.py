"""Make smollm2.npz and tokenizer.json: what other implementations say about the default model.

Run by hand, where torch, transformers, accelerate, gguf and llama-cpp-python are installed:

    python tests/goldens/make_goldens.py tokens --gguf SmolLM2-135M-Instruct.Q4_1.gguf questions.jsonl ...
    python tests/goldens/make_goldens.py tokenizer --gguf SmolLM2-135M-Instruct.Q4_1.gguf questions.jsonl ...

Each line of a questions file is a JSON object with "question" or "turns" (MT-bench, GSM8K).
The tests read the stored ids only, so they need none of these.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
NUM_NEW_TOKENS = 64

PLAIN = [
    "A",
    "The",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "Water boils at 100 degrees",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "import numpy as np\n\ndef softmax(x, axis=-1):\n",
    "#include <stdio.h>\n\nint main(void) {\n\tint total = 0;\n\tfor (int i = 0; i < 10; i++) {\n",
    "SELECT name, COUNT(*) AS orders\nFROM customers\nJOIN orders ON",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    "3.14159265358979",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "Invoice 20240917-000381: 12 x 49.95 EUR = 599.40 EUR; VAT 19% =",
    "Привет! Как дела? Сегодня",
    "東京は日本の首都であり、",
    "Ça va très bien, merci. L'été dernier, nous",
    "مرحبا بالعالم",
    "🙂🙃 emoji are fun 🎉🎉 because",
    "   leading spaces and\ttabs\n\n\nand blank lines   ",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n{"name":',
    "| fruit | price |\n|---|---|\n| apple | 1.20 |\n| pear |",
    "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n",
]

CHATS = [
    "What is the capital of France?",
    "Write a haiku about the ocean.",
    "Translate to French: good morning, my friend.",
    "List three uses of a paperclip.",
    "What is 17 * 23?",
]

PIECES = [
    *PLAIN,
    *CHATS,
    "",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t\t",
    " \n \n ",
    "a  b   c    d",
    "trailing   ",
    "I'm you're he'll they've we'd it's DON'T I'LL O'Brien 's 't",
    "0123456789",
    "12 345 6,789 0.001 1e-9 0xFF 1_000",
    "½ ² ٣٤ 一二三 Ⅷ",
    "naïve café Zürich Straße Ærøskøbing",
    "e\u0301 vs \u00e9 (combining and composed)",
    "한국어 문장입니다.",
    "हिन्दी में लिखा",
    "ไทย ภาษา",
    "עברית",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 ☃️",
    "\u200b zero \u00a0 width \u3000 spaces",
    "\x00\x01\x7f",
    "\ufeffBOM",
    "\U0001d518\U0001d52b\U0001d526\U0001d520\U0001d52c\U0001d521\U0001d522 \U00013000",
    "CamelCaseWords snake_case_words kebab-case-words SCREAMING_CASE",
    "https://example.com/a/b?c=d&e=f#g",
    "user@example.com",
    "!!! ??? ... --- ___ *** ### @@@",
    "a=b+c*(d-e)/f%g",
    "if (x && y || !z) { return x[0]->y; }",
    "    def f(self):\n        return self._x\n\n\n    @property\n",
    "\tif err != nil {\n\t\treturn nil, err\n\t}\n",
    '<div class="a">text &amp; more</div>',
    "$\\int_0^\\infty e^{-x^2} dx = \\frac{\\sqrt{\\pi}}{2}$",
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "a<|im_end|>b",
    " <|im_end|> ",
    "<|im_end|><|im_end|>\n<|im_start|>",
    "<|im_start|>system\nx<|im_end|>\n",
    "<repo_name>x<file_sep>y<jupyter_code>z",
    "<|im_end",
    "<|im_start|assistant",
    "<|not_a_token|>",
    "< |im_end|>",
    "ABCdefGHI 123abc456 abc123",
    "3rd 4th 21st 1990s",
    "x" * 200,
    "ab " * 50,
    "\n" * 30,
    " " * 100,
]

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi! How can I help?"},
        {"role": "user", "content": "  spaces \n and\n\nlines 🙂 "},
    ],
    [{"role": "assistant", "content": "I speak first."}],
    [{"role": "tool", "content": '{"x": 1}'}, {"role": "user", "content": "<b>&amp;</b>"}],
]


def read_questions(paths: list[Path], count: int) -> list[str]:
    """A fixed random choice of `count` questions out of each file."""
    chosen: list[str] = []
    for path in paths:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        texts = [row["question"] if "question" in row else row["turns"][0] for row in rows]
        chosen += random.Random(0).sample(texts, count)
    return chosen


def make_prompts(tokenizer: Any, questions: list[str]) -> list[list[int]]:
    """Token ids of every prompt: plain text, chats, and long ones built from several questions."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def chat(text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        return encode(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

    together = "\n\n".join(questions)
    long = [encode(together)[:length] for length in (127, 128, 129, 300, 512, 700)]
    return [encode(text) for text in PLAIN] + [chat(text) for text in CHATS + questions] + long


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float], list[float]]:
    """`NUM_NEW_TOKENS` greedy tokens, each one's log-probability, and the gap to the next best logit."""
    import torch
    from transformers import DynamicCache

    tokens, logprobs, gaps = [], [], []
    ids, cache = torch.tensor([prompt]), DynamicCache(config=model.config)
    with torch.inference_mode():
        for _ in range(NUM_NEW_TOKENS):
            logits = model(input_ids=ids, cache=cache, logits_to_keep=1).logits[0, -1]
            best = torch.topk(logits, 2)
            tokens.append(int(best.indices[0]))
            logprobs.append(float(torch.log_softmax(logits.double(), -1)[tokens[-1]]))
            gaps.append(float(best.values[0] - best.values[1]))
            ids = best.indices[:1][None]
    return tokens, logprobs, gaps


def versions(*packages: str) -> dict[str, str]:
    """The installed version of each package."""
    return {name: importlib.metadata.version(name) for name in packages}


def make_tokens(gguf: Path, questions: list[str]) -> None:
    """Write smollm2.npz. `gguf` is read, dequantised and un-permuted by transformers, not by jbatch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = make_prompts(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name), questions)
    results = []
    for index, prompt in enumerate(prompts):
        results.append(greedy(model, prompt))
        print(f"{index + 1}/{len(prompts)}: {len(prompt)} tokens", flush=True)
    tokens, logprobs, gaps = zip(*results, strict=True)
    header = {"model": gguf.name, "greedy": "float32, continues past end of sequence"}
    header |= versions("torch", "transformers", "gguf")
    np.savez_compressed(
        HERE / "smollm2.npz",
        header=np.array(json.dumps(header)),
        prompts=np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts]),
        prompt_lengths=np.asarray([len(prompt) for prompt in prompts], np.int32),
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        gaps=np.asarray(gaps, np.float32),
    )


def make_tokenizer(gguf: Path, questions: list[str]) -> None:
    """Write tokenizer.json: ids by llama.cpp's tokenizer, chats rendered by transformers."""
    import llama_cpp
    from transformers import AutoTokenizer

    llama = llama_cpp.Llama(str(gguf), vocab_only=True, verbose=False)
    hugging_face = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    pairs = [
        {"text": text, "ids": llama.tokenize(text.encode(), add_bos=False, special=True)}
        for text in [*PIECES, *questions]
    ]
    chats = [
        {
            "messages": messages,
            "add_generation_prompt": add,
            "text": hugging_face.apply_chat_template(messages, tokenize=False, add_generation_prompt=add),
        }
        for messages in CONVERSATIONS
        for add in (True, False)
    ]
    header = {"model": gguf.name} | versions("llama-cpp-python", "transformers")
    content = {"header": header, "pairs": pairs, "chats": chats}
    (HERE / "tokenizer.json").write_text(json.dumps(content) + "\n", "utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["tokens", "tokenizer"])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("questions", type=Path, nargs="+")
    args = parser.parse_args()
    if args.what == "tokens":
        make_tokens(args.gguf, read_questions(args.questions, 5))
    else:
        make_tokenizer(args.gguf, read_questions(args.questions, 25))


if __name__ == "__main__":
    main()
