"""The types of ggml's tensors by their numbers, and of values of the metadata."""

from __future__ import annotations

# Values of the metadata: number → letter of numpy. 8 is a string, 9 an array.
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
# Tensors: type by its number, from 0 on. Those behind _4_ or _8_ were interleaved for some
# processors, and ggml has given them up.
_NAMES = """
F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS
IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0
TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4 Q1_0 Q2_0
"""
TYPES = {number: name for number, name in enumerate(_NAMES.split()) if name != "-"}
# Inputs of a block → types, each with the bytes of one. A row is blocks after each other.
_SIZES = {
    32: "Q4_0 18 Q4_1 20 Q5_0 22 Q5_1 24 Q8_0 34 Q8_1 40 IQ4_NL 18 MXFP4 17 Q4_0_4_4 18"
    " Q4_0_4_8 18 Q4_0_8_8 18 IQ4_NL_4_4 18 IQ4_NL_4_8 18 IQ4_NL_8_8 18",
    64: "NVFP4 36 Q2_0 18",
    128: "Q1_0 18",
    256: "Q2_K 84 Q3_K 110 Q4_K 144 Q5_K 176 Q6_K 210 Q8_K 292 IQ1_S 50 IQ1_M 56 IQ2_XXS 66"
    " IQ2_XS 74 IQ2_S 82 IQ3_XXS 98 IQ3_S 110 IQ4_XS 136 TQ1_0 54 TQ2_0 66",
}
BLOCKS: dict[str, tuple[int, int]] = {
    name: (size, int(num_bytes))
    for size, words in _SIZES.items()
    for name, num_bytes in zip(words.split()[::2], words.split()[1::2], strict=True)
}
