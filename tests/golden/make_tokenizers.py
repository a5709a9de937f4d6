"""Writes tokenizers.json.gz: texts with their token ids as llama.cpp and Hugging Face give them.

Made with xllamacpp 2026.10.11549 (llama.cpp), transformers 5.24.0, tokenizers 0.23.3, gguf 0.19.0,
sentencepiece 0.2.3:

    python make_tokenizers.py SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m-q4_k_m.gguf

For ``smollm`` the vocabulary is that of the model file. For the other pre-tokenizers a small one
is trained on the texts below, stored as a tokenizer.json, and given to llama.cpp inside a tiny
model. Where llama.cpp's hand-written splitting differs from the regular expression that the model's
authors published, the expression is right: such texts are listed under ``llama_cpp_differs`` and
the ids stored are Hugging Face's. In gpt-4o it forgets that words contain combining marks.

``gemma3`` has the ids of sentencepiece itself, from a model with the file's tokens and scores, and
llama.cpp's where control tokens are parsed. ``sentencepiece`` is a small vocabulary like Llama 2's:
``ids`` are llama.cpp's, ``first`` those of a tokenizer.json that puts a space at the start only.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import xllamacpp
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

OUTPUT = Path(__file__).with_name("tokenizers.json.gz")
LLAMA_BPE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool>", "\n\n\n\n"]

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\n\n\n\n\n",
    "\t",
    "\t\t  \t",
    "a",
    " a",
    "  a",
    "a ",
    "a  ",
    "a  b   c    d",
    "Hello, world!",
    "Hello world\n",
    "Hello\r\nworld\r\n\r\n",
    "\r",
    "line one \n  line two\n\n\n   line three",
    "trailing spaces   \n\t\n  x",
    "The quick brown fox jumps over the lazy dog.",
    "I'm, you're, he's, we'll, they've, she'd, don't",
    "I'M, YOU'RE, HE'S, WE'LL, THEY'VE, SHE'D, DON'T",
    "'s't're've'm'll'd'S'T",
    "rock 'n' roll '' ''' 'quoted'",
    "0",
    "007",
    "1234567890",
    "3.14159, -42 and 1e-9; 1,000,000",
    "12 345 6789",
    "x1y22z333w4444",
    "½ ² ³ Ⅷ ① ٣ ৭ 五 〇",
    "CamelCaseAndHTTPServerID snake_case SCREAMING_CASE kebab-case",
    "iPhone McDonald ÉCOLE école ǅungla ﬁne",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) {\n\ta[i] += b[i] * c;\n}\n",
    '<html>\n  <body class="a b">&amp; &lt;x&gt;</body>\n</html>',
    '{"key": [1, 2.5, null, true], "nested": {"a\\n": "b\\u00e9"}}',
    "SELECT * FROM t WHERE a != 'b' -- comment;",
    "https://example.com/a/b?c=d&e=%20f#g user@example.com",
    "C:\\Users\\name\\file.txt /usr/local/lib ../../x ~/y",
    "!!! ??? ... --- === *** ((( ))) [[]] {{}}",
    "a/b//c///\n/\n//\n",
    "$100 €200 £300 ¥400 5% 6‰",
    "“curly” ‘quotes’ – en — em … «guillemets» ‹x›",
    "naïve café résumé Ångström Straße İstanbul",
    "e\u0301 n\u0303 a\u0308\u0304 \u0301alone",
    "Zalgo: h\u0335\u0321e\u0334\u0350l\u0337\u0489l\u0338o",
    "Привет, как дела? Ёлка",
    "Γειά σου Κόσμε, ἀρχή",
    "שלום עולם בְּרֵאשִׁית",
    "مرحبا بالعالم، كيف الحال؟ ١٢٣",
    "mixed \u202bעברית\u202c and \u200eLTR\u200f marks",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก ภาษาไทย",
    "வணக்கம் உலகம்",
    "မင်္ဂလာပါ ສະບາຍດີ ជំរាបសួរ",
    "გამარჯობა Բարեւ",
    "你好，世界！这是一个测试。",
    "こんにちは世界。カタカナ ひらがな ﾊﾝｶｸ",
    "안녕하세요 세계",
    "中文English混合123テスト",
    "👋🌍 🙂😀",
    "👨‍👩‍👧‍👦 👩🏽‍💻 🏳️‍🌈 🇩🇪🇯🇵 1️⃣ ❤️",
    "emoji👍in👍words",
    "𝕳𝖊𝖑𝖑𝖔 𝟘𝟙𝟚 𐍈 𓀀 🀄",
    "\u00a0nbsp\u00a0here \u2003em\u2009thin\u3000ideographic\u200b",
    "\u0085next\u2028line\u2029para",
    "\ufeffBOM at start",
    "zero\u0000byte \u0001\u0007\u001b[31m\u007f",
    "\ufffd replacement \ufffe\uffff \ue000 private",
    "\U0010ffff \U000e0041 \U0001f3fb",
    "soft\u00adhyphen zero\u200cwidth\u200djoiner",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ ∑∏∫ √2 ≠ ≤ ∞",
    "a\u0300\u0301\u0302b ʰʷ ˈa ꜛ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|>",
    "<|im_start|><|im_end|>",
    "<|<|im_start|>im_start|>",
    "<|im_start|",
    "|im_start|>",
    "text<|im_end|>text <|im_end|> text",
    "<|endoftext|><repo_name>x<file_sep>",
    "<tool>call</tool> <tool><tool>",
    "x\n\n\n\ny\n\n\n\n\nz",
    "<|bos|>a<|eos|>",
    "<s>[INST] x [/INST]</s>",
    "Ġ Ċ ĠĠ raw byte-level spelling Ã©",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "----------------------------------------------------------------",
    "                                                                x",
    "\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\tx",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "the the the The THE tHE",
    "1a2b3c 1st 2nd 3rd 4th v1.2.3-rc.4+build.5",
    "A.B.C. U.S.A. e.g. i.e. Ph.D.",
    "(a)[b]{c}<d>\"e\"'f'`g`",
    "x=1;y=2;z=x+y\n\nprint(z)\n",
    "    indented\n        more\n\tand tab\n",
    "end with newline spaces \n  ",
    "۰۱۲ ０１２ ⅓ 1⁄2",
    "Don’t can’t it’s (curly)",
    "don't'll've's 'Twas",
    "ALLCAPSthenlower lowerTHENCAPS ÀÉÎõü ŁÓDŹ",
    "日本's 中'S é'll",
]


def trained(pre: str) -> Tokenizer:
    """A small byte-level BPE as the authors of such models store it."""
    if pre == "gpt-2":
        splitting = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        pattern = Regex(LLAMA_BPE if pre == "llama-bpe" else GPT_4O)
        splitting = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = splitting
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 500,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens(USER_DEFINED)
    if pre == "llama-bpe":
        bos = [("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
        tokenizer.post_processor = processors.TemplateProcessing("<|bos|> $A", None, bos)
    return tokenizer


def write_tiny_model(path: Path, pre: str, tokenizer: Tokenizer) -> None:
    """A one-layer llama that llama.cpp loads for the sake of its vocabulary."""
    content = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    kinds = {tokenizer.token_to_id(text): 3 for text in CONTROL}
    kinds |= {tokenizer.token_to_id(text): 4 for text in USER_DEFINED}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts[index] for index in range(size)])
    writer.add_token_types([kinds.get(index, 1) for index in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.token_to_id("<|bos|>"))
    writer.add_eos_token_id(tokenizer.token_to_id("<|eos|>"))
    write_weights(writer, size)


def write_weights(writer: gguf.GGUFWriter, size: int, width: int = 32) -> None:
    """What llama.cpp wants beside a vocabulary of ``size`` tokens."""
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    shapes = {"token_embd.weight": (size, width), "output_norm.weight": (width,)}
    shapes |= {f"blk.0.{name}.weight": (width,) for name in ("attn_norm", "ffn_norm")}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}.weight"] = (width, width)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_ids(model: Path) -> list[list[list[int]]]:
    """For each text, the ids without and with special tokens parsed; never with BOS."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = 128
    params.warmup = False
    params.port = 0
    server = xllamacpp.Server(params)

    def tokenize(text: str, parse_special: bool) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": parse_special}
        request = urllib.request.Request(
            server.listening_address + "/tokenize",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)["tokens"]

    return [[tokenize(text, False), tokenize(text, True)] for text in TEXTS]


def hugging_face_ids(
    tokenizer: Tokenizer, control: Sequence[str] = CONTROL
) -> list[list[list[int]]]:
    """As ``llama_cpp_ids``."""
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=control, split_special_tokens=True
    )
    special = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=control, split_special_tokens=False
    )
    results = []
    for text in TEXTS:
        pair = [
            plain(text, add_special_tokens=False, split_special_tokens=True)["input_ids"],
            special(text, add_special_tokens=False)["input_ids"],
        ]
        results.append(pair)
    return results


def sentencepiece_ids(model: Path) -> list[list[int]]:
    """For each text, what sentencepiece makes of it with a GGUF file's tokens."""
    fields = {key: field.contents() for key, field in gguf.GGUFReader(model).fields.items()}
    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.unk_id = fields["tokenizer.ggml.unknown_token_id"]
    proto.trainer_spec.unk_piece = fields["tokenizer.ggml.tokens"][proto.trainer_spec.unk_id]
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    names = ("tokens", "scores", "token_type")
    for index, (text, score, kind) in enumerate(
        zip(*(fields[f"tokenizer.ggml.{name}"] for name in names), strict=True)
    ):
        # llama.cpp's converter writes user-defined tokens with plain spaces.
        text = text.replace(" ", "\u2581") if kind == 4 else text
        kind = 2 if index == proto.trainer_spec.unk_id else kind
        proto.pieces.add(piece=text, score=score, type=kind)
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    return [processor.encode(text) for text in TEXTS]


def small_sentencepiece() -> dict[str, object]:
    """A vocabulary like Llama 2's, with its ids."""
    with tempfile.TemporaryDirectory() as directory:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for text in TEXTS * 2 for line in text.split("\n")]),
            model_prefix=f"{directory}/small",
            model_type="bpe",
            vocab_size=700,
            character_coverage=0.98,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            control_symbols=["<|im_start|>", "<|im_end|>"],
            user_defined_symbols=[*USER_DEFINED, "  "],
        )
        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(Path(f"{directory}/small.model").read_bytes())
        pieces = [[piece.piece, piece.score, piece.type] for piece in proto.pieces]
        for piece in pieces:
            piece[0] = piece[0].replace("\u2581", " ") if piece[2] == 4 else piece[0]
        path = Path(directory) / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([piece[0] for piece in pieces])
        writer.add_token_scores([piece[1] for piece in pieces])
        writer.add_token_types([piece[2] for piece in pieces])
        for name, index in (("unk", 0), ("bos", 1), ("eos", 2)):
            getattr(writer, f"add_{name}_token_id")(index)
        write_weights(writer, len(pieces))
        ids = llama_cpp_ids(path)
    tokenizer = sentencepiece_file(pieces)
    legacy = hugging_face_ids(tokenizer, [p[0] for p in pieces if p[2] == 3])
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    first = hugging_face_ids(tokenizer, [p[0] for p in pieces if p[2] == 3])
    differs = [i for i, (a, b) in enumerate(zip(ids, legacy, strict=True)) if a != b]
    print("sentencepiece: Hugging Face differs on", [TEXTS[i] for i in differs])
    return {"pieces": pieces, "ids": ids, "first": first, "hugging_face_differs": differs}


def sentencepiece_file(pieces: list[list[object]]) -> Tokenizer:
    """The same as a tokenizer.json, with merges as transformers derives them."""
    vocab = {piece[0]: index for index, piece in enumerate(pieces)}
    added = [piece[0] for piece in pieces if piece[2] in (3, 4)]
    scores = {piece[0]: piece[1] for piece in pieces}
    merges = generate_merges(vocab, scores, skip_tokens=added)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    for text in added:
        is_control = pieces[vocab[text]][2] == 3
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=is_control)])
    return tokenizer


def main() -> None:
    """Write the file."""
    golden = {"texts": TEXTS, "smollm": {"ids": llama_cpp_ids(Path(sys.argv[1]))}}
    gemma3 = Path(sys.argv[2])
    plain, theirs = sentencepiece_ids(gemma3), llama_cpp_ids(gemma3)
    golden["gemma3"] = {"ids": [[a, b] for a, (_, b) in zip(plain, theirs, strict=True)]}
    differs = [t for t, a, (b, _) in zip(TEXTS, plain, theirs, strict=True) if a != b]
    print("gemma3: llama.cpp differs on", differs)
    golden["sentencepiece"] = small_sentencepiece()
    for pre in ("gpt-2", "llama-bpe", "gpt-4o"):
        tokenizer = trained(pre)
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory) / "tiny.gguf"
            write_tiny_model(model, pre, tokenizer)
            theirs = llama_cpp_ids(model)
        ours = hugging_face_ids(tokenizer)
        differs = [i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b]
        golden[pre] = {
            "tokenizer": json.loads(tokenizer.to_str()),
            "ids": ours,
            "llama_cpp_differs": differs,
        }
        print(pre, "llama.cpp differs on", [TEXTS[i] for i in differs])
    data = json.dumps(golden, ensure_ascii=False, separators=(",", ":")).encode()
    OUTPUT.write_bytes(gzip.compress(data, 9, mtime=0))


if __name__ == "__main__":
    main()
