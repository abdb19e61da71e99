"""The shape of a plan: three days with their stops in order of time, and a budget that adds up.

Exit status 0: the shape is as it should be; 1: it is not, and what is printed says why.
"""
import sys
import csv
import re


def wrong(why):
    print(why)
    sys.exit(1)


with open("input/places.csv", newline="", encoding="utf-8") as f:
    places = {row["place"]: row["kind"] for row in csv.DictReader(f)}
try:
    plan = open("output/itinerary.md", encoding="utf-8").read()
    rows = list(csv.reader(open("output/budget.csv", newline="", encoding="utf-8")))
except (OSError, UnicodeDecodeError) as e:
    wrong(e)

days = re.split(r"(?m)^## Day (\d)\s*$", plan)[1:]
if days[::2] != ["1", "2", "3"]:
    wrong("the headings are not ## Day 1, 2, 3")
seen = set()
for number, text in zip(days[::2], days[1::2]):
    stops = re.findall(r"(?m)^- ([0-2]\d:[0-5]\d) (.+?)\s*$", text)
    if [t for t, _ in stops] != sorted(t for t, _ in stops):
        wrong(f"day {number} is not in order of time")
    kinds = []
    for _, name in stops:
        place = next((p for p in places if name.startswith(p)), None)
        if place is None:
            wrong(f"day {number}: no such place: {name}")
        if places[place] == "sight":
            if place in seen:
                wrong(f"{place} comes twice")
            seen.add(place)
        kinds.append(places[place])
    if kinds.count("sight") < 2 or kinds.count("meal") < 1:
        wrong(f"day {number} has too few sights or meals")

try:
    amounts = [float(amount) for _, amount in rows[1:]]
except ValueError as e:
    wrong(f"budget.csv: {e}")
if len(rows) < 3 or rows[0] != ["item", "euros"] or rows[-1][0] != "total":
    wrong("budget.csv does not begin with item,euros and end with the total")
if abs(sum(amounts[:-1]) - amounts[-1]) > 0.005 or amounts[-1] > 400:
    wrong(f"the items come to {sum(amounts[:-1])}, the total is {amounts[-1]}")
