"""Run the three tasks on one model and write scores and samples as JSON: `evaluate.py TASKS OUT MODEL MODEL_ARGS [MORE_PACKAGES]`.

With MORE_PACKAGES, a folder that is looked through last, a Python that has torch can run it without lm-eval installed: that is how transformers' own scores are had.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TASKS = ("local_choice", "local_text", "local_generate")


def main(folder: str, out: str, model: str, arguments: str, packages: str = "") -> None:
    if packages:
        sys.path.append(packages)
    import lm_eval
    from lm_eval.tasks import TaskManager

    done: Any = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        batch_size=4,
    )
    scores = {task: {name: value for name, value in done["results"][task].items() if isinstance(value, float) and "stderr" not in name} for task in TASKS}
    samples = {task: [sample["resps"] for sample in sorted(done["samples"][task], key=lambda sample: sample["doc_id"])] for task in TASKS}
    Path(out).write_text(json.dumps({"scores": scores, "samples": samples}))


if __name__ == "__main__":
    main(*sys.argv[1:])
