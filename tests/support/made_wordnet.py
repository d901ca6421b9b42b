"""Small files in the format of WordNet."""

MEANINGS = {
    "noun": {"dog": "an animal that barks", "cat": "an animal that purrs", "tree": "a tall plant", "sea": "salt water",
             "moon": "it shines at night", "bread": "it is baked", "hammer": "a tool for nails", "snow": "frozen rain",
             "apple": "a fruit", "house": "one lives in it", "horse": "one rides it", "button": "it closes a shirt",
             "chair": "one sits on it", "shoe": "one wears it on a foot", "lamp": "it gives light", "king": "a ruler"},
    "verb": {"run": "move fast", "sleep": "rest with closed eyes", "swim": "move in water", "sing": "make music"},
    "adj": {"red": "of the color of blood", "cold": "with a low temperature"},
    "adv": {"often": "many times", "soon": "in a short time"},
}  # fmt: skip
UNCOUNTED = {"noun": {"xyst": "a walk in a garden"}}


def make_wordnet(folder):
    """Writes the files, after a licence of one line; a word has an example after its meaning."""
    folder.mkdir(parents=True)
    for part, meanings in MEANINGS.items():
        index = ["  1 This is the licence  "]
        data = ["  1 This is the licence  "]
        for number, (word, meaning) in enumerate((meanings | UNCOUNTED.get(part, {})).items(), 1):
            counted = int(word in meanings)
            index.append(f"{word} {part[0]} 2 1 @ 2 {counted} {number:08} 99999999  ")
            data.append(f'{number:08} 03 {part[0]} 02 {word} 0 an_old_{word} 0 000 | {meaning}; "a {word}"  ')
        (folder / f"index.{part}").write_text("\n".join(index) + "\n")
        (folder / f"data.{part}").write_text("\n".join(data) + "\n")
    return folder
