"""Texts on which tokenizers differ, for comparing one with another."""

# ruff: noqa: E501, RUF001  (the texts are what they are)

import random

CODE = """def f(x: int) -> str:\n\tif x != 0x1F:\n        return f"{x!r:>10}" + '\\n' * 3  # ünï\n\n\n"""
ZIG = """pub fn main() !void {\r\n    const a = [_]u8{ 1, 2 } ** 4;\r\n    std.debug.print("{s}\\n", .{&a});\r\n}\r\n"""

HARD = [
    "", " ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n\n", " \n ", "\u2028\u2029\x85\x0b\x0c", "\u00a0", "\u3000",
    "a", " a", "a ", "  a  ", "a  b   c    d", "\ta\t\tb", "Hello, world!", " hello\n  world \n", "don't we'll I'M",
    "\0", "a\0b", "\x01\x02\x1b[31m\x7f", "\x80\x9f", "\ufeffbom", "\ufffd", "\ufffe\uffff", "\u200b\u200d\u200e",
    "😀", "👨‍👩‍👧‍👦 👩🏽‍💻 🇩🇪🇫🇷", "🏳️‍🌈", "e\u0301 é", "a\u0300\u0301\u0302\u0303", "\u0301", "Å Å Å", "ﬁ ﬀ ① ½ ｱ Ａ",
    "العربية والعبرية", "עִבְרִית", "\u202eabc\u202c", "हिन्दी", "ไทยภาษา", "漢字かなカナ", "한국어 조합", "한글",
    "\ud7ff\ue000\uf8ff", "\U000f0000\U0010ffff", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈", "Привет мир", "αβγ ΑΒΓ", "ñandú ÇA ßẞ", "İıſ",
    "<s>", "</s>", "<unk>", "<pad>", "a<s>b</s>", " <s> ", "<s", "s>", "<<s>>", "[INST] hi [/INST]", "[INST]",
    "<|endoftext|>", "<|im_start|>user\n", "<0x41>", "<0x0A>", "<0xE2><0x82>", "<SPECIAL_20>", "[control_8]", "[IMG]",
    "[REFERENCE_DOC_1]", "[REFERENCE_DOC_1][REFERENCE_DOC_12] [REF]x[/REF]", "[REF]<s>[REF]", "[REF]<0x41>[/REF]",
    "[REFERENCE_DOC_", " [REF] ", "<sep>", "<sep> a<sep><s><sep>", "<seple", "<<sep>>",
    "▁", "▁▁", "▁a", "a▁", " ▁ ", "▁ ▁a b", "a ▁", "▁<s>", "Ġhello Ċ", "##ing", "Â©", "�\u0080",
    "a" * 10_000, " " * 3000, "\n" * 777, "ab" * 999, "é" * 500, "😀" * 300, "x" + " " * 63 + "y", "=" * 200,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 5,
    "0", "1234567890", "3.14159e-10", "1,000,000", "٠١٢٣", "Ⅷ", "²³", "12:30:59 2024-02-29",
    CODE, ZIG, CODE * 7, "https://example.org/a/b?c=d&e=%20f#g_h~i", "mail@example.org", "C:\\Windows\\x", "{{ x }}",
    "$\\frac{a}{b}$", "mixed Кириллица и English とJapanese 和中文", "\\x80\\xff", "\xc3\x28 \xa0\xa1", "ÿþ", "\"'`´‘’“”",
    "---", "...", "…", "!!!???", "a/b\n/c\r\n", "word\n\nword \n\n word", "tab\tin the\tmiddle", "CamelCaseXMLHttp2",
]  # fmt: skip

RANGES = [
    (0x20, 0x7E), (0x00, 0x20), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xDFF),
    (0x1E00, 0x20CF), (0x2100, 0x2BFF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xFFFF),
    (0x10000, 0x10FFFF), (0x1F300, 0x1FAFF),
]  # fmt: skip


def strings(count: int = 400, seed: int = 0) -> list[str]:
    """HARD, each run of up to 150 spaces, and random texts from one or several ranges of Unicode."""
    chance = random.Random(seed)
    made = [
        f"{a}{' ' * n}{b}" for n in range(150) for a, b in [chance.choice([("", ""), ("x", "y"), ("\n", "if")])]
    ]
    words = " ".join(HARD[:110]).split(" ")
    for _ in range(count):
        spans = chance.choices(RANGES, k=chance.randint(1, 3))
        text = "".join(chr(chance.randint(*chance.choice(spans))) for _ in range(chance.randint(1, 60)))
        made += [text, " ".join(chance.choices(words, k=12)) + text]
    return [*HARD, *made]
