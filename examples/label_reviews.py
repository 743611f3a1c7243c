"""Label reviews of products as positive or negative, and count how many labels are right.

pip download --no-deps vaderSentiment==0.5
python examples/label_reviews.py ask vaderSentiment-0.5.zip > reviews.jsonl
fminfer run reviews.jsonl --model-name MODEL --output answers.jsonl
python examples/label_reviews.py count answers.jsonl

`ask` has the model write one of the labels, and nothing else. `ask --options` makes it
a question of multiple choice: each review is a request for every label, which asks for
logprobs and draws nothing; the likelier label counts.

The reviews are sentences about products, each rated by people from -4 to 4 (Hutto &
Gilbert, VADER, 2014; MIT licence). Those that are clear are used: a mean rating of 1 or
more, or of -1 or less.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# number, mean rating and text, with tabs between
RATINGS = "amazonReviewSnippets_GroundTruth.txt"
LABELS = ("negative", "positive")
CLEAR = 1.0
INSTRUCTION = """\
Is the review positive or negative?

Review: The battery died after two days.
Sentiment: negative

Review: Easy to set up, and the picture is great.
Sentiment: positive

Review: I sent it back the next morning.
Sentiment: negative

Review: It is small, light and does what I need.
Sentiment: positive

Review: {review}
Sentiment:"""


def read_reviews(package: Path) -> Iterator[tuple[str, str, str]]:
    """Yield number, label and text of each clear review of the package's file."""
    with zipfile.ZipFile(package) as packed:
        (name,) = [each for each in packed.namelist() if each.endswith(".tar.gz")]
        with tarfile.open(fileobj=io.BytesIO(packed.read(name))) as archive:
            (path,) = [each for each in archive.getnames() if each.endswith(RATINGS)]
            file = archive.extractfile(path)
            assert file is not None, f"{path} is not a file"
            lines = file.read().decode("utf-8", "replace").splitlines()
    for line in lines:
        number, rating, review = line.split("\t")
        if abs(float(rating)) >= CLEAR:
            yield number, LABELS[float(rating) > 0], review


def ask(package: Path, *, has_options: bool) -> Iterator[dict[str, Any]]:
    """Yield the lines of requests. What stands beside `request` comes back beside the answer."""
    for number, label, review in read_reviews(package):
        prompt = INSTRUCTION.format(review=review)
        if not has_options:
            # A space stands before each label, as in the examples above.
            choice = {"choice": [f" {option}" for option in LABELS]}
            fields = {"prompt": prompt, "temperature": 0, "structured_outputs": choice}
            yield {"request": fields, "label": label}
            continue
        for option in LABELS:
            # Nothing is drawn: the logprobs of the prompt's own tokens are asked for.
            fields = {
                "prompt": f"{prompt} {option}",
                "max_tokens": 0,
                "echo": True,
                "logprobs": 0,
            }
            yield {
                "request": fields,
                "label": label,
                "option": option,
                "review": number,
            }


def option_logprob(answer: dict[str, Any]) -> float:
    """Return the logprob of the option at the prompt's end, of all its tokens."""
    start = len(answer["request"]["prompt"]) - len(f" {answer['option']}")
    found = answer["result"]["choices"][0]["logprobs"]
    each = zip(found["text_offset"], found["token_logprobs"], strict=True)
    return sum(logprob for offset, logprob in each if offset >= start)


def count(answers: list[dict[str, Any]]) -> tuple[int, int]:
    """Return how many labels are right, and how many reviews there are."""
    if answers and "option" in answers[0]:
        groups: dict[str, list[dict[str, Any]]] = {}
        for answer in answers:
            groups.setdefault(answer["review"], []).append(answer)
        best = [max(group, key=option_logprob) for group in groups.values()]
        found = [(answer["label"], answer["option"]) for answer in best]
    else:
        texts = [answer["result"]["choices"][0]["text"].strip() for answer in answers]
        found = [
            (answer["label"], text) for answer, text in zip(answers, texts, strict=True)
        ]
    return sum(label == answer for label, answer in found), len(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("ask", help="write requests to stdout")
    asking.add_argument(
        "package", type=Path, help="the file that `pip download` fetched"
    )
    asking.add_argument(
        "--options", action="store_true", help="a request for every label"
    )
    counting = commands.add_parser("count", help="count the labels that are right")
    counting.add_argument("answers", type=Path, help="the output of `fminfer run`")
    given = parser.parse_args()
    if given.command == "ask":
        try:
            lines = list(ask(given.package, has_options=given.options))
        except (OSError, ValueError, zipfile.BadZipFile, tarfile.TarError) as error:
            parser.exit(
                2, f"{given.package} is not the file of vaderSentiment 0.5: {error}\n"
            )
        for line in lines:
            print(json.dumps(line))
        return

    try:
        with given.answers.open() as file:
            right, total = count([json.loads(line) for line in file])
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.exit(
            2,
            f"{given.answers} holds no answers to this script's requests: {error!r}\n",
        )
    print(f"{right:,} of {total:,} labels are right ({right / max(1, total):.1%})")


if __name__ == "__main__":
    main()
