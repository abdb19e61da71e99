"""The shape of a poster: an SVG in portrait with all texts, and a PNG whose pixels can be read.

Exit status 0: the shape is as it should be; 1: it is not, and what is printed says why.
"""
import sys
import json
import re
import struct
import xml.etree.ElementTree as xml
import zlib


def wrong(why):
    print(why)
    sys.exit(1)


event = json.load(open("input/event.json", encoding="utf-8"))
try:
    svg = xml.parse("output/poster.svg").getroot()
    png = open("output/poster.png", "rb").read()
except (OSError, xml.ParseError) as e:
    wrong(e)

if not svg.tag.endswith("svg"):
    wrong("poster.svg is no SVG")
try:
    width, height = (float(re.match(r"[\d.]+", svg.get(k, "")).group()) for k in ("width", "height"))
except AttributeError:
    wrong("poster.svg has no width and height")
if width >= height:
    wrong("poster.svg is not in portrait")
texts = " ".join(" ".join("".join(e.itertext()).split()) for e in svg.iter() if e.tag.endswith("}text") or e.tag == "text")
for value in event.values():
    if value not in texts:
        wrong(f"poster.svg lacks {value!r}")

if png[:8] != b"\x89PNG\r\n\x1a\n":
    wrong("poster.png is no PNG")
at, data, head = 8, b"", None
while at + 12 <= len(png):
    size, kind = struct.unpack(">I4s", png[at:at + 8])
    body = png[at + 8:at + 8 + size]
    if struct.unpack(">I", png[at + 8 + size:at + 12 + size])[0] != zlib.crc32(kind + body):
        wrong("poster.png: a checksum is wrong")
    if kind == b"IHDR":
        head = struct.unpack(">IIBBBBB", body)
    if kind == b"IDAT":
        data += body
    at += 12 + size
if head is None:
    wrong("poster.png has no header")
width, height, depth, colour = head[:4]
if width >= height or height < 800 or width * height > 100_000_000:
    wrong(f"poster.png has {width}x{height} pixels")
samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
pixels = zlib.decompressobj().decompress(data, 500_000_000)
if len(pixels) != height * (1 + (width * samples * depth + 7) // 8):
    wrong("poster.png: there are not as many pixels as its header says")
if len(set(pixels)) < 4:
    wrong("poster.png is all of one colour, or nearly")
