"""Answer files of requests on two actors of a Ray cluster, or of this machine.

python examples/ray_data.py answers.jsonl requests.jsonl more.jsonl
"""

import argparse

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("output", help="a .jsonl file; errors go beside it")
parser.add_argument("inputs", nargs="+", help=".jsonl files of requests")
names = parser.parse_args()

from fminfer.integrations.ray import answer, read_lines, write_lines  # noqa: E402 (Ray is slow)

requests = read_lines(*names.inputs)
answered = answer(
    requests, None, concurrency=2, num_cpus=0.5, batch_size=256, dtype="float32"
)
write_lines(answered, names.output)
