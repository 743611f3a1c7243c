"""`fminfer families`: the architectures that run."""

from __future__ import annotations

import json
import sys
from typing import NamedTuple, get_args

import click

from fminfer.cli.process import print_wrapped
from fminfer.core.config import Quantized
from fminfer.core.terminal import find_width

WIDTH = 92  # of the table


class Example(NamedTuple):
    """A model of the hub."""

    hub_id: str
    billions: float  # of parameters

    @property
    def gibibytes(self) -> float:
        """What its weights take at 16 bits."""
        return self.billions * 2e9 / 2**30


# Those that give vectors, or scores with a head for classes. All others write text;
# what decoders give without their head, docs/encoders.md says.
ENCODERS = (
    "bert",
    "camembert",
    "distilbert",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "xlm-roberta",
)
# Sizes are those of the models' pages, rounded.
EXAMPLES: dict[str, Example] = {
    "apertus": Example("swiss-ai/Apertus-8B-2509", 8.05),
    "arcee": Example("arcee-ai/AFM-4.5B-Base", 4.62),
    "bart": Example("facebook/bart-large-cnn", 0.406),
    "bert": Example("BAAI/bge-large-en-v1.5", 0.335),
    "biogpt": Example("microsoft/biogpt", 0.347),
    "bloom": Example("bigscience/bloom", 176),
    "camembert": Example("dangvantuan/sentence-camembert-large", 0.337),
    "codegen": Example("Salesforce/codegen-350M-mono", 0.357),
    "cohere": Example("CohereForAI/c4ai-command-r-v01", 35),
    "cohere2": Example("CohereForAI/c4ai-command-r7b-12-2024", 8.03),
    "cwm": Example("facebook/cwm", 32.6),
    "deepseek_v2": Example("deepseek-ai/DeepSeek-V2-Lite", 15.7),
    "deepseek_v3": Example("unsloth/DeepSeek-V3-bf16", 671),
    "distilbert": Example("sentence-transformers/msmarco-distilbert-base-v4", 0.066),
    "dots1": Example("rednote-hilab/dots.llm1.base", 143),
    "ernie4_5": Example("baidu/ERNIE-4.5-0.3B-PT", 0.361),
    "ernie4_5_moe": Example("baidu/ERNIE-4.5-21B-A3B-PT", 21.8),
    "exaone4": Example("LGAI-EXAONE/EXAONE-4.0-1.2B", 1.28),
    "exaone_moe": Example("LGAI-EXAONE/K-EXAONE-236B-A23B", 237),
    "falcon": Example("tiiuae/falcon-7b", 6.92),
    "flex_olmo": Example("allenai/FlexOlmo-7x7B-1T", 33.3),
    "gemma": Example("google/gemma-2b", 2.51),
    "gemma2": Example("google/gemma-2-9b", 9.24),
    "gemma3": Example("google/gemma-3-4b-pt", 3.88),
    "gemma3_text": Example("google/gemma-3-1b-it", 1),
    "glm": Example("THUDM/glm-4-9b-hf", 9.4),
    "glm4": Example("zai-org/GLM-4-9B-0414", 9.4),
    "glm4_moe": Example("zai-org/GLM-4.5-Air", 107),
    "glm4_moe_lite": Example("zai-org/GLM-4.7-Flash", 30),
    "gpt2": Example("openai-community/gpt2", 0.124),
    "gpt_bigcode": Example("bigcode/starcoder", 15.5),
    "gpt_neo": Example("EleutherAI/gpt-neo-2.7B", 2.65),
    "gpt_neox": Example("EleutherAI/gpt-neox-20b", 20.6),
    "gpt_neox_japanese": Example("abeja/gpt-neox-japanese-2.7b", 2.7),
    "gpt_oss": Example("unsloth/gpt-oss-20b-BF16", 20.9),
    "gptj": Example("EleutherAI/gpt-j-6b", 6.05),
    "granite": Example("ibm-granite/granite-3.1-8b-base", 8.17),
    "granitemoe": Example("ibm-granite/granite-3.1-1b-a400m-base", 1.33),
    "granitemoeshared": Example("ibm-research/moe-7b-1b-active-shared-experts", 6.7),
    "helium": Example("kyutai/helium-1-preview-2b", 2.17),
    "hunyuan_v1_dense": Example("tencent/Hunyuan-7B-Instruct", 7.5),
    "hunyuan_v1_moe": Example("tencent/Hunyuan-A13B-Instruct", 80.4),
    "hyperclovax": Example("naver-hyperclovax/HyperCLOVAX-SEED-Think-14B", 14.7),
    "internlm3": Example("internlm/internlm3-8b-instruct", 8.8),
    "jais2": Example("inceptionai/Jais-2-8B-Chat", 8.09),
    "llama": Example("meta-llama/Llama-3.1-8B", 8.03),
    "mbart": Example("facebook/mbart-large-50-many-to-many-mmt", 0.611),
    "minimax_m2": Example("ModelCloud/MiniMax-M2-BF16", 229),  # its own is in FP8
    "ministral": Example("mistralai/Ministral-8B-Instruct-2410", 8),
    "ministral3": Example("mistralai/Ministral-3-8B-Base-2512", 8.5),
    "mistral": Example("mistralai/Mistral-7B-v0.3", 7.25),
    "mistral3": Example("mistralai/Mistral-Small-3.1-24B-Base-2503", 23.6),
    "mixtral": Example("mistralai/Mixtral-8x7B-v0.1", 46.7),
    "modernbert": Example("Alibaba-NLP/gte-modernbert-base", 0.149),
    "mpnet": Example("sentence-transformers/all-mpnet-base-v2", 0.109),
    "mpt": Example("mosaicml/mpt-7b", 6.65),
    "mt5": Example("google/mt5-xl", 3.23),
    "nanochat": Example("karpathy/nanochat-d32", 1.88),
    "nemotron": Example("nvidia/Minitron-4B-Base", 4.19),
    "nomic_bert": Example("nomic-ai/nomic-embed-text-v1.5", 0.137),
    "olmo": Example("allenai/OLMo-7B-hf", 6.89),
    "olmo2": Example("allenai/OLMo-2-1124-7B", 7.3),
    "olmo3": Example("allenai/Olmo-3-1025-7B", 7.3),
    "olmoe": Example("allenai/OLMoE-1B-7B-0924", 6.92),
    "opt": Example("facebook/opt-66b", 65.7),
    "persimmon": Example("adept/persimmon-8b-base", 9.4),
    "phi": Example("microsoft/phi-2", 2.78),
    "phi3": Example("microsoft/phi-4", 14.7),
    "phimoe": Example("microsoft/Phi-3.5-MoE-instruct", 41.9),
    "qwen2": Example("Qwen/Qwen2-7B", 7.62),
    "qwen2_moe": Example("Qwen/Qwen1.5-MoE-A2.7B", 14.3),
    "qwen3": Example("Qwen/Qwen3-8B", 8.19),
    "qwen3_moe": Example("Qwen/Qwen3-30B-A3B", 30.5),
    "roberta": Example("sentence-transformers/all-roberta-large-v1", 0.355),
    "seed_oss": Example("ByteDance-Seed/Seed-OSS-36B-Base", 36.2),
    "smollm3": Example("HuggingFaceTB/SmolLM3-3B", 3.08),
    "solar_open": Example("upstage/Solar-Open-100B", 103),
    "stablelm": Example("stabilityai/stablelm-2-1_6b", 1.65),
    "starcoder2": Example("bigcode/starcoder2-3b", 3.03),
    "t5": Example("google/flan-t5-xl", 2.78),
    "umt5": Example("google/umt5-xl", 3.24),
    "vaultgemma": Example("google/vaultgemma-1b", 1.04),
    "xglm": Example("facebook/xglm-564M", 0.565),
    "xlm-roberta": Example("BAAI/bge-m3", 0.568),
    "youtu": Example("tencent/Youtu-LLM-2B", 1.96),
}


@click.command()
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def families(is_json: bool) -> None:
    """List the model families that run, each with a model of the Hugging Face hub.

    \b
    fminfer families
    fminfer families --json

    A family is the `model_type` of a config.json. GiB is the size of the weights in 16 bits.
    docs/models.md lists the forms of checkpoints, and says how to fetch one.
    """
    if is_json:
        fields = {
            name: {
                "example": example.hub_id,
                "billions": example.billions,
                "gives": _describe_output(name),
            }
            for name, example in EXAMPLES.items()
        }
        click.echo(json.dumps(fields, indent=2))
        return
    form = "{:<18} {:<48} {:>7}  {}"
    if 0 < find_width(sys.stdout) < WIDTH:
        form = "{}: {}, {} GiB, {}"
    else:
        click.echo(form.format("family", "example", "GiB", "gives"))
    for name, example in EXAMPLES.items():
        print_wrapped(
            form.format(
                name, example.hub_id, f"{example.gibibytes:.1f}", _describe_output(name)
            )
        )
    bits = (
        f"16 or 32 bits, or in fewer by --quantize ({', '.join(get_args(Quantized))})"
    )
    print_wrapped(
        f"All run in {bits}. Of GGUF files, docs/models.md says which run.", err=True
    )


def _describe_output(name: str) -> str:
    return "vectors, scores" if name in ENCODERS else "text"
