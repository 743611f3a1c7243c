"""lighteval 0.13: lighteval custom MODEL examples/lighteval_model.py TASKS"""

from lighteval.models.abstract_model import LightevalModel
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.utils.cache_management import SampleCache

from fminfer import Engine


class FminferModel(LightevalModel):
    def __init__(self, config):
        self.config = config
        self._cache = SampleCache(config)  # which lighteval looks for
        self.engine = Engine(config.model_name, dtype="float32")
        has_template = bool(self.tokenizer.chat_template)
        self.prompts = PromptManager(has_template, self.tokenizer)
        self.bos = {"add_special_tokens": not has_template}

    tokenizer = property(lambda self: self.engine.tokenizer.hf)
    add_special_tokens = property(lambda self: self.bos["add_special_tokens"])
    max_length = property(lambda self: self.engine.context_length)

    def answer(self, requests):  # all run together
        records = sorted(self.engine.run(requests), key=lambda r: r.line.number)
        return [record.choices[0].fields for record in records]

    def greedy_until(self, docs):
        requests = [
            {
                "prompt": self.prompts.prepare_prompt(doc),
                "max_tokens": doc.generation_size,
                "stop": doc.stop_sequences,
                "temperature": 0,
            }
            for doc in docs
        ]
        answers = self.answer([request | self.bos for request in requests])
        return [ModelResponse(text=[each["text"]]) for each in answers]

    def loglikelihood(self, docs):
        contexts = [self.prompts.prepare_prompt(doc) for doc in docs]
        responses = [ModelResponse(logprobs=[], argmax_logits_eq_gold=[]) for _ in docs]
        texts = []
        for doc, context, response in zip(docs, contexts, responses, strict=True):
            pairs = self.tok_encode_pair(context, doc.choices, pairwise=True)
            texts += [(response, a, b) for a, b in zip(*pairs, strict=True)]
        fields = {"max_tokens": 0, "echo": True, "logprobs": 1}
        answers = self.answer([fields | {"prompt": a + b} for _, a, b in texts])
        for (response, _, b), answer in zip(texts, answers, strict=True):
            values = answer["logprobs"]["token_logprobs"][-len(b) :]
            tops = answer["logprobs"]["top_logprobs"][-len(b) :]
            is_best = values == [max(top.values()) for top in tops]
            response.logprobs.append(sum(values))
            response.argmax_logits_eq_gold.append(is_best)
        return responses

    def loglikelihood_rolling(self, docs):
        raise NotImplementedError("for perplexities use fminfer under lm-eval")
