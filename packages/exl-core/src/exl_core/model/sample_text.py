"""Mixed sample text for measurements on a model before it serves requests (key smoothing).

Changing it changes the contents of 4-bit caches, and nothing else.
"""

from __future__ import annotations

SAMPLE_TEXT = """\
The river rises in the hills to the north of the town and runs for about forty miles before it \
reaches the sea. In the nineteenth century several mills stood along its banks; most of them were \
built between 1820 and 1850, when the trade in wool was at its height. The last one closed in \
1931, and the building is now a museum. According to the census of 2001, the parish had a \
population of 1,274, a little less than ten years before.

= Early career =

He was born in the village in 1867, the second son of a schoolmaster. After two years at the \
university he left without a degree, and joined a small company of actors that toured the country. \
His first play was not a success: the critics called it long and confused, and it was taken off \
after nine performances. "I had written it in a week," he said later, "and it deserved no better." \
The second, which opened in March 1894, made him known at once. It was performed more than 200 \
times, and translated into French, German and Italian.

It was late when she came home. The lamp in the hall was still burning, but nobody answered when \
she called, and the letter that she had left on the table was gone. "You should have told me," \
said her brother from the stairs. "I would have come with you." She did not know what to say, so \
she took off her coat, sat down by the fire and waited for him to go on.

Scientists have found that the small birds, which weigh about 12 grams, can remember the places of \
several hundred seeds for as long as six months. In an experiment that was published last year, \
they were shown eight boxes, of which only three held food. How do they do it? Part of the answer \
seems to be that a region of the brain grows in autumn and becomes smaller again in spring. The \
team, led by a professor of zoology, now wants to learn whether other animals do the same.

To make the sauce, melt the butter in a pan, add the flour and stir for two minutes. Pour in the \
milk slowly, then season with salt, pepper and a little nutmeg. Do not let it boil.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

The storm crossed the coast on the evening of 9 September with winds of 120 km / h. At least five \
people were killed, and damage was estimated at $ 85 million.
"""
