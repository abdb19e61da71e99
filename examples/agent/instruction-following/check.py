"""The shape of the text: four lines of 40 characters, no word twice, no z.

Exit status 0: the shape is as it should be; 1: it is not, and what is printed says why.
"""
import sys
import re

text = open("answer.txt", encoding="utf-8").read().strip()
lines = text.split("\n")
words = re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text.lower())
twice = {w for w in words if words.count(w) > 1}
kept = [
    len(lines) == 4,
    len(lines) == 4 and all(len(line) == 40 and line.endswith(".") for line in lines),
    len(words) > 3 and not twice,
    bool(words) and "z" not in text.lower(),
]
print([len(line) for line in lines], twice)
print("score:", sum(kept) / len(kept))
