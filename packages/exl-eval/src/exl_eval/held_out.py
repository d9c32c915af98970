"""Held-out text on which a converted model is compared with its source.

Written for this purpose, in many styles, so that it is in no calibration set. A change to it
changes the figures in the records of conversions, which contain its hash.
"""

from __future__ import annotations

from exl_core.model.sample_text import SAMPLE_TEXT

HELD_OUT_TEXT = (
    SAMPLE_TEXT
    + """
The lighthouse at the end of the long pier was built of grey stone and stood empty for most of the \
last century. A family from the mainland bought it in 1987, repaired the roof, and opened a small \
hotel with four rooms, one above the other. From the highest of them a guest can see the ferries \
leave at six in the morning and come back, full of bicycles and crates of fruit, a little before \
dark. There is no lift, and nobody has ever complained about it.

"Is it far to the station?" she asked.
"Twenty minutes if you walk along the canal, ten if you take the number 14 bus," said the old man. \
"But on a day like this I would walk. The bus goes past the cement works."
She thanked him and turned to go. "Wait," he called after her. "The bridge is closed. You will \
have to cross at the lock, and the keeper has his dinner at noon."

== Properties ==

Copper is a soft metal with a high thermal and electrical conductivity. Its density is 8.96 g/cm3, \
and it melts at 1,085 degrees Celsius. In moist air it is slowly covered by a green layer of \
carbonates, which protects what lies below. About 60 percent of the copper that is produced goes \
into electrical equipment; the rest is used in construction, transport and machines. Because it \
can be recycled without any loss of quality, roughly a third of the demand is met by scrap.

To find the shortest path in a graph without negative weights, keep a priority queue of the nodes \
that have been reached. Take the nearest one, look at its neighbors, and update their distances. \
Each edge is looked at once, so that the running time is O((n + m) log n) with a binary heap.

import heapq

def shortest_paths(graph, source):
    distances = {source: 0}
    queue = [(0, source)]
    while queue:
        distance, node = heapq.heappop(queue)
        if distance > distances[node]:
            continue  # an older, longer way to it
        for neighbor, weight in graph[node].items():
            candidate = distance + weight
            if candidate < distances.get(neighbor, float("inf")):
                distances[neighbor] = candidate
                heapq.heappush(queue, (candidate, neighbor))
    return distances

Question: A train leaves at 9:40 and arrives at 13:05. It stops for 5 minutes at each of three \
stations. How long does it move?
Answer: The journey takes 3 hours and 25 minutes, which is 205 minutes. The stops take 15 minutes \
in all, so the train moves for 190 minutes, or 3 hours and 10 minutes.

Dear Ms. Alvarez,
Thank you for your letter of 3 June. We are sorry that the second parcel arrived damaged. A new \
one was sent today and should reach you by the end of the week; please keep the old box until our \
driver collects it. You will not be charged for either delivery.
With kind regards,
T. Okafor, Customer Service

| month | rain (mm) | days of frost |
|---|---|---|
| January | 62 | 14 |
| April | 48 | 3 |
| July | 91 | 0 |
| October | 73 | 2 |

The committee met for the first time in the spring and agreed on very little. Some of its members \
wanted the old market hall to be torn down at once; others, among them the only architect, argued \
that the iron frame was sound and that a new roof would cost less than a new building. The \
vote was put off twice. When it was finally taken, on a wet evening in November, the hall was \
saved by a single voice, and the mayor, who had not voted, said that he had expected nothing else.

Im Herbst zieht der Nebel durch das Tal, und die Kinder gehen mit Laternen zur Schule. Am \
Nachmittag, wenn die Sonne kommt, sieht man vom Berg aus bis zum See. La boulangerie ouvre à sept \
heures, mais le dimanche il faut attendre jusqu'à huit heures et demie. El tren de las cinco llegó \
con retraso porque había nieve en las vías.

Remember that a habit is easier to keep when it is tied to something that you do anyway. If you \
want to read more, put the book where you drink your coffee; if you want to walk, leave your shoes \
by the door. Start with five minutes. Nobody fails at five minutes, and on most days you will not \
stop there.
"""
)
