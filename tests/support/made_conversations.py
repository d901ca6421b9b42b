"""Conversations with messages and parts of every type, made from a seed."""

import random

TEXT = "hi there what is 1,234 + 5? naïve 你好 🙂 def f(x): \n\n <|bos|> <|user_end|> 'quoted' it's a-b_c"
WORDS = TEXT.split(" ")


def made_conversations(count, seed=0):
    """Returns records of conversations, of 1 to 7 messages, some with a system message and calls of Python."""
    rng = random.Random(seed)

    def text():
        return " ".join(rng.choices(WORDS, k=rng.randint(0, 12)))

    def content(role):
        if role == "user" or rng.random() < 0.5:
            return text()
        types = rng.choices(("text", "python", "python_output"), k=rng.randint(1, 5))
        return [{"type": each, "text": text()} for each in types]

    records = []
    for _ in range(count):
        roles = ["assistant" if number % 2 else "user" for number in range(rng.randint(1, 7))]
        messages = [{"role": role, "content": content(role)} for role in roles]
        if rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": text()})
        records.append({"messages": messages})
    return records
