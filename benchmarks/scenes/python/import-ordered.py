import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path


def lines_by_indent(path):
    """The lines of a file under their indentation."""
    found = defaultdict(list)
    for line in path.read_text().splitlines():
        found[len(line) - len(line.lstrip())].append(line)
    return found


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
