"""Language models: their tasks, presets, kinds of data and commands."""

from train_jax.plugin import Data, Plugin, Stage

_REPORTS = "train_jax.language.commands:LanguageCommands"

PLUGIN = Plugin(
    name="language",
    tasks={
        "language": "train_jax.language.task:LanguageTask",
        "chat": "train_jax.language.chat.task:ChatTask",
        "rollouts": "train_jax.language.chat.rollouts:RolloutTask",
        "instructions": "train_jax.language.instructions.task:InstructionTask",
    },
    reports={"language": _REPORTS, "chat": _REPORTS, "rollouts": _REPORTS},
    presets=("train_jax.language.presets:PRESETS",),
    data={
        "text": Data("train_jax.language.text_building:TextData"),
        "chat": Data("train_jax.language.chat.building:ChatData"),
        "instructions": Data("train_jax.language.instructions.building:InstructionData"),
    },
    derivations={"--phase": "train_jax.language.phases:phase_run"},
    stages={
        "tokenizer": Stage(
            "train_jax.language.stages.tokenizer:cli",
            "data",
            "train, evaluate or inspect a tokenizer for text",
        ),
        "core": Stage(
            "train_jax.language.stages.core:Core",
            "evaluation",
            "score a language run on the CORE tasks of an evaluation bundle",
        ),
        "chat-eval": Stage(
            "train_jax.language.stages.chat_eval:ChatEval",
            "evaluation",
            "ask a language run arithmetic, spelling and other tasks, as a chat",
        ),
        "generate": Stage(
            "train_jax.language.stages.generate:Generate", "evaluation", "continue prompts with a language model"
        ),
        "chat": Stage("train_jax.language.stages.chat:Chat", "evaluation", "talk to a language model in the terminal"),
        "bench-generate": Stage(
            "train_jax.language.stages.bench_generate:BenchGenerate",
            "evaluation",
            "measure how fast a language model writes, for 1 to 128 rows",
        ),
    },
)
