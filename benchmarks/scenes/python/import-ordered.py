import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path


def words_by_length(path):
    """The words of a file under their lengths, the most frequent first."""
    counts = Counter(path.read_text().split())
    found = default▏dict(list)▕
    for word, _ in counts.most_common():
        found[len(word)].append(word)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    print(json.dumps(words_by_length(parser.parse_args().file)))
