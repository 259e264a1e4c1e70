"""The command `evaluate`: a model, or a server, answers held-out rows, and the answers are judged."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tpu_kit.config.commands import CONFIG, JSON, OK, command
from tpu_kit.generation.requests import JudgedModel


@command(
    "It uses the held-out rows of the adapter's run, or else of `train`, without questions that also occur in the\n"
    "training data. generate_rows=200 limits the rows, generate_tokens the answers; verifier names the judge.\n"
    "With an adapter, the result is written to eval.json in the run's folder. With server=http://..., a server\n"
    "answers the same rows, and nothing is written.\n\n"
    "Exit codes: 0 done, 1 error, 2 bad arguments.",
    CONFIG | JSON,
    (JudgedModel,),
)
def evaluate(args: argparse.Namespace) -> int:
    """Compare the base and the tuned model on held-out rows."""
    (options,) = args.options
    judge = _of_server if options.server else _of_adapter if args.adapter else _of_base
    text, values = judge(args, options)
    print(json.dumps(values, indent=2) if args.json else text)
    return OK


def _of_adapter(args: argparse.Namespace, options: JudgedModel) -> tuple[str, dict[str, Any]]:
    """Compares base and tuned model, and writes eval.json; returns the text to print and the values for --json."""
    from tpu_kit.generation.evaluation import evaluate as evaluation

    comparison = evaluation.evaluate_adapter(args.config, args.adapter, chat=options.chat)
    return str(comparison), comparison.to_dict()


def _of_base(args: argparse.Namespace, options: JudgedModel) -> tuple[str, dict[str, Any]]:
    """Judges the base model's answers to held-out rows, and writes nothing.

    Returns the text to print, and the values for --json: "base" and "seen_in_training".
    """
    from tpu_kit.generation.evaluation import evaluate as evaluation

    prepared = evaluation.held_out(args.config, plain=options.chat is False)
    report = evaluation.evaluate(args.config, prepared)
    seen = prepared.eval_report.seen_in_training if prepared.eval_report else 0
    text = f"base model only\n{report}\n{seen} rows left out, because their questions are in the training data"
    return text, {"base": report.to_dict(), "seen_in_training": seen}


def _of_server(args: argparse.Namespace, options: JudgedModel) -> tuple[str, dict[str, Any]]:
    """Judges a server's answers to the rows of the adapter or, without it, of the configuration; writes nothing.

    Returns the text to print, and the values for --json: "served".
    """
    from tpu_kit.generation.evaluation import evaluate as evaluation
    from tpu_kit.recipes.evaluation.server_answers import Server, evaluate_server

    assert options.server is not None
    config, plain = args.config, options.chat is False
    server = Server(options.server, options.served_model or config.served_name)
    if args.adapter:
        config, prepared, _, plain = evaluation.rows_of_adapter(config, args.adapter, chat=options.chat)
    else:
        prepared = evaluation.held_out(config, plain=plain)
    report = evaluate_server(config, prepared, server, plain)
    return f"{server.model} of {server.address}\n{report}", {"served": report.to_dict()}
