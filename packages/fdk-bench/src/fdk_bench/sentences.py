"""The sentences whose embeddings `fdk-bench accuracy` compares; fixed, so that runs compare."""

# Varied on purpose: lengths from two words to sixty, questions, numbers, code, dialogue, law,
# sport, rare words and other languages. Changing one changes every recorded cosine.
SENTENCES = (
    "Good morning.",
    "The kettle has boiled twice and nobody has made the tea.",
    "How many litres of paint do I need for a room of twelve square metres?",
    "The committee postponed its decision until the auditors had finished their report.",
    "She scored the winning goal in the ninety-third minute.",
    "Turn left at the bakery, cross the bridge, and the library is on your right.",
    "The half-life of caesium-137 is about thirty years.",
    "I never said that he stole the money.",
    "def area(radius): return 3.14159 * radius ** 2",
    "Prices rose by 2.4 % in March, the slowest rise since the autumn of 2021.",
    "An apple a day keeps the doctor away.",
    "The tenant shall give the landlord no less than two months' notice in writing.",
    "Snow had fallen on the upper fields, and the sheep stood in a dark line along the wall.",
    "My laptop will not start after the update; the screen stays black and the fan runs.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "Two tickets to Leeds, please, and a receipt.",
    "Why does bread go stale faster in the refrigerator than on the counter?",
    "The violinist tuned her instrument, glanced at the conductor, and waited for silence.",
    "Der Zug nach Hamburg fährt heute von Gleis sieben.",
    "Le marché ouvre à huit heures, sauf le dimanche.",
    "SELECT name, COUNT(*) FROM orders GROUP BY name ORDER BY 2 DESC;",
    "He was, by every account, a difficult man to like and an easy one to admire.",
    "Mix the flour with the butter, add one egg, and leave the dough to rest for an hour.",
    "The spacecraft entered orbit around Jupiter after a journey of nearly five years.",
    "No refund is given for goods that were damaged after delivery.",
    "Her grandmother taught her to knit, to play chess, and to distrust adverbs.",
    "The patient reports mild pain in the left knee, worse on stairs, with no swelling.",
    "Is it cheaper to repair the roof now or to wait for spring?",
    "Interest rates, exchange rates and the price of oil all moved against the company in the "
    "same quarter, so that a year which had begun with record orders, a new factory and a long "
    "queue of hopeful investors ended with a profit warning, two resignations and a terse letter "
    "to the shareholders.",
    "A small brown bird sang from the hedge.",
    "Quantum error correction spreads one logical qubit over many physical ones.",
    "Thank you, that was exactly what I needed!",
)
