"""The command `pod`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tpu_kit.config.commands import CONFIG, OK, command, switch
from tpu_kit.extras.pods.engines import ENGINES


@command(
    "It starts nothing. The files name the secrets that are set here (HF_TOKEN, WANDB_API_KEY), never their values.\n\n"
    "Exit codes: 0 written, 1 the folder cannot be written, 2 bad arguments.",
    {
        **CONFIG,
        "--slice": {"required": True, "metavar": "NAME", "help": "the slice, such as v5litepod-64 or v4-32"},
        "--with": {"required": True, "dest": "engine", "choices": list(ENGINES), "help": "the engine of the job"},
        "--spot": switch("ask for Spot capacity, which is cheaper and may be taken away"),
        "--zone": {"metavar": "ZONE", "help": "the zone; xpk and gcloud need it"},
        "--image": {"metavar": "NAME", "help": "another container image, for jobset and xpk"},
        "--out": {"metavar": "FOLDER", "help": "the folder for the files; pods/RUN_NAME/ENGINE by default"},
    },
)
def pod(args: argparse.Namespace) -> int:
    """Write the files and commands that run a configuration on a slice of several hosts."""
    from tpu_kit.extras.pods.report import write
    from tpu_kit.extras.pods.slice_job import check_job

    job = check_job(args.config, args.slice, args.engine, args.zone, args.image, args.spot)
    print(write(job, args.engine, Path(args.out or f"pods/{job.name}/{args.engine}")))
    return OK
