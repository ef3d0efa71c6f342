"""The messages that the fuzzer makes reach the reader's checks; finding what breaks it takes
atheris and minutes.
"""

import random
from pathlib import Path

from benchmarks.attacks.fuzzed import MOST, TEMPLATES, changed, corpus, read
from hierfl.nodes.messages import Refused, from_bytes, like


def test_changed_messages_are_read_or_refused(tmp_path: Path) -> None:
    corpus(tmp_path)
    valid = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert len(valid) == len(TEMPLATES)
    for content, template in zip(valid, TEMPLATES, strict=True):
        like(from_bytes(content, most=MOST).tree, template)
    how, refused = random.Random(0), 0
    for _ in range(600):
        content = changed(how.choice(valid), how)
        read(content)
        try:
            from_bytes(content, most=MOST)
        except Refused:
            refused += 1
    assert 100 < refused < 500  # some are messages still, with another tree
