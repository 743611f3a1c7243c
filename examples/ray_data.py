"""Answer files of requests on two actors of a Ray cluster, or of this machine.

python examples/ray_data.py answers.jsonl requests.jsonl more.jsonl
"""

import sys

from fminfer.integrations.ray import answer, read_lines, write_lines

output, *inputs = sys.argv[1:]
requests = read_lines(*inputs)
answered = answer(requests, None, concurrency=2, num_cpus=0.5, batch_size=256, dtype="float32")
write_lines(answered, output)
