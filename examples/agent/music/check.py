"""The shape of a round: a MIDI file with two voices, the second like the first but later.

Exit status 0: the shape is as it should be; 1: it is not, and what is printed says why.
"""
import sys
import re
import struct


def wrong(why):
    print(why)
    sys.exit(1)


try:
    data = open("output/tune.mid", "rb").read(10_000_000)
    notes = open("output/notes.txt", encoding="utf-8").read(10_000)
except (OSError, UnicodeDecodeError) as e:
    wrong(e)
if data[:4] != b"MThd" or struct.unpack(">IH", data[4:10]) != (6, 1):
    wrong("tune.mid is no MIDI file of format 1")


def number(at):
    value = 0
    while True:
        value = value << 7 | data[at] & 0x7F
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def track(at, end):
    """Gives the notes of a track as (time, pitch), and the tempo if it sets one."""
    time, status, sounding, begun, tempo = 0, 0, set(), [], None
    while at < end:
        wait, at = number(at)
        time += wait
        if data[at] >= 0x80:
            status, at = data[at], at + 1
        if status == 0xFF:
            kind = data[at]
            size, at = number(at + 1)
            if kind == 0x51:
                tempo = int.from_bytes(data[at:at + 3], "big")
            at += size
        elif status >= 0xF0:
            size, at = number(at)
            at += size
        elif status >> 4 in (0xC, 0xD):
            at += 1
        else:
            pitch, force = data[at], data[at + 1]
            if status >> 4 == 9 and force:
                begun.append((time, pitch))
                sounding.add(pitch)
            elif status >> 4 in (8, 9):
                sounding.discard(pitch)
            at += 2
    if sounding:
        wrong("a note does not end")
    return begun, tempo


at, voices, tempo = 14, [], None
try:
    while at < len(data):
        if data[at:at + 4] != b"MTrk":
            wrong("there is something between the tracks")
        end = at + 8 + struct.unpack(">I", data[at + 4:at + 8])[0]
        begun, says = track(at + 8, end)
        tempo = tempo or says
        if begun:
            voices.append(begun)
        at = end
except (IndexError, struct.error):
    wrong("tune.mid breaks off")
if len(voices) != 2 or min(map(len, voices)) < 16 or not tempo:
    wrong("there are not two voices with 16 notes each, and a tempo")
first, second = voices
later = second[0][0] - first[0][0]
if later <= 0 or any((t + later, p) != s for (t, p), s in zip(first, second)):
    wrong("the second voice does not repeat the first, later")
if not re.search(r"(?m)^key: \S+ (major|minor)$", notes) or not re.search(r"(?m)^tempo: \d+$", notes):
    wrong("notes.txt does not say key and tempo")
