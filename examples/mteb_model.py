"""mteb 2: python examples/mteb_model.py MODEL TASK [TASK …]   # MODEL: a folder, a hub id"""

import sys

import mteb
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder

from fminfer import SentenceTransformer


class FminferEncoder(AbsEncoder):
    """All texts of a call go to the engine together, whatever batch mteb asks for."""

    def __init__(self, name):
        self.model = SentenceTransformer(name)
        self.model_prompts = dict(self.model.prompts) or None
        self.mteb_model_meta = ModelMeta.create_empty({"name": f"fminfer/{name}"})

    def encode(self, inputs, *, task_metadata, prompt_type=None, **others):
        name = self.get_prompt_name(task_metadata, prompt_type)
        texts = [text for batch in inputs for text in batch["text"]]
        return self.model.encode(texts, prompt=self.model.prompts.get(name))


if __name__ == "__main__":
    model, *tasks = sys.argv[1:]
    results = mteb.evaluate(FminferEncoder(model), mteb.get_tasks(tasks=tasks))
    for result in results.task_results:
        print(result.task_name, result.get_score())
