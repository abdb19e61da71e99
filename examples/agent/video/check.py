"""The shape of a film: MP4, AVI or GIF, of two seconds or more, and its story.

Exit status 0: the shape is as it should be; 1: it is not, and what is printed says why.
"""
import sys
import os
import struct


def wrong(why):
    print(why)
    sys.exit(1)


def mp4(data):
    """Gives the seconds that the movie header says."""
    at = data.find(b"mvhd")
    if data[4:8] != b"ftyp" or at < 0:
        wrong("video.mp4 has no movie header")
    if data[at + 4] == 1:
        scale, length = struct.unpack(">IQ", data[at + 24:at + 36])
    else:
        scale, length = struct.unpack(">II", data[at + 16:at + 24])
    return length / scale, 24, 160  # how many pictures there are stands elsewhere


def avi(data):
    at = data.find(b"avih")
    if data[:4] != b"RIFF" or data[8:12] != b"AVI " or at < 0:
        wrong("video.avi has no header")
    fields = struct.unpack("<14I", data[at + 8:at + 64])
    if data.count(b"00db") + data.count(b"00dc") < fields[4]:
        wrong("video.avi lacks pictures")
    return fields[0] * fields[4] / 1e6, fields[4], fields[8]


def gif(data):
    if data[:6] != b"GIF89a":
        wrong("video.gif is no animation")
    pictures, time, at = 0, 0, 13
    if data[10] & 0x80:
        at += 3 << (data[10] & 7) + 1
    while at < len(data) and data[at] != 0x3B:
        kind = data[at]
        if kind == 0x21:
            if data[at + 1] == 0xF9:
                time += struct.unpack("<H", data[at + 4:at + 6])[0]
            at += 2
        else:
            pictures += 1
            at += 10 + (3 << (data[at + 9] & 7) + 1 if data[at + 9] & 0x80 else 0) + 1
        while data[at]:
            at += data[at] + 1
        at += 1
    return time / 100, pictures, struct.unpack("<H", data[6:8])[0]


for read in (mp4, avi, gif):
    name = f"output/video.{read.__name__}"
    if os.path.isfile(name):
        try:
            seconds, pictures, width = read(open(name, "rb").read(1 << 30))
        except (struct.error, IndexError, ZeroDivisionError) as e:
            wrong(f"{name}: {e}")
        break
else:
    wrong("there is no video.mp4, video.avi or video.gif")
if seconds < 2 or pictures < 24 or width < 160:
    wrong(f"{name}: {seconds} seconds, {pictures} pictures, {width} pixels wide")
if not os.path.isfile("output/story.txt") or len(open("output/story.txt", "rb").read(1000).split()) < 5:
    wrong("story.txt is missing, or has no sentence")
