"""The server."""

from train_jax.plugin import Plugin, Stage

PLUGIN = Plugin(
    name="serve",
    stages={
        "serve": Stage(
            "train_jax.serve.stage:Serve",
            "evaluation",
            "serve language and puzzle models: a web page and OpenAI's interface",
        ),
    },
)
