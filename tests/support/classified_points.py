"""The data and the loss of a training script: points of a plane, in two classes. The tests add the model."""

POINTS = """def points(seed, count):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return x, (x.prod(1) > 0).long()


def train_data():
    return points(0, 100)


def test_data():
    return points(1, 37)


def loss(model, batch):
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits, y), {"accuracy": (logits.argmax(-1) == y).float().mean()}
"""
