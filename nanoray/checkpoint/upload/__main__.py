"""`nanoray upload RUN [URL]`: send a run's checkpoints and records to object storage by hand.

It sends what is on disk and not there yet, and tries each object a few times. URL: that of the run's
own key `upload` by default. Exit 0 when all is there, 1 when not.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from nanoray.base.storage.store import StorageError, Store
from nanoray.base.storage.url import join, problem_of
from nanoray.checkpoint.manifest import Damage
from nanoray.checkpoint.upload.sender import Removed, RunSender
from nanoray.cli import exit_code_of, name_program, tool_parser
from nanoray.config.load import read_mapping
from nanoray.errors import ConfigError

TRIES = 5
BACK_OFF_S = 1.0  # before the second try; twice as long before each further one


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return exit_code_of(lambda: _upload(argv))


def _upload(argv: list[str] | None) -> int:
    parser = tool_parser(name_program("upload"), __doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("url", nargs="?", default="", help="where the runs are [the run's own]")
    args = parser.parse_args(argv)
    run = args.run.resolve()
    if not (run / "config.json").is_file():
        raise ConfigError(f"{args.run} is no run's folder: it has no config.json")
    url = args.url or str(read_mapping(run / "config.json").get("upload") or "")
    if not url:
        raise ConfigError(f"the run {args.run} has no key upload; give the URL, too")
    problem = problem_of("URL", url)
    if problem:
        raise ConfigError(problem)
    return send_all(run, url)


def send_all(run: Path, url: str) -> int:
    """Send a run; return 0, or 1 if something is not there after some tries."""
    where = join(url, run.name)
    hold = run / f".upload-by-hand-{os.getpid()}"
    try:
        store = Store(where)
        sender = RunSender(run, store, hold, log=print)
    except StorageError as error:
        raise ConfigError(str(error)) from None
    has_failed = False
    tried = 0
    try:
        while True:
            try:
                sender.find_sent()
                pending = sender.pending()
                if not pending:
                    break
                sender.send_checkpoint(pending[0])
                tried = 0
            except (Removed, Damage) as skipped:
                has_failed = True
                print(f"warning  {skipped}; it is left out")
            except StorageError as error:
                tried += 1
                if error.refused or tried == TRIES:
                    raise
                time.sleep(BACK_OFF_S * 2 ** (tried - 1))
        sender.send_records(at_once=True)
    except StorageError as error:
        left = sender.pending()
        newest = (sender.sent() or ["none, so nothing is safe there"])[0]
        print(
            f"FAILED  {error}; not at {where}: {', '.join([*left, 'records'])} (newest checkpoint "
            f"there: {newest})"
        )
        return 1
    finally:
        shutil.rmtree(hold, ignore_errors=True)
    print(f"{where}: {len(sender.sent())} checkpoint(s), newest {(sender.sent() or ['none'])[0]}")
    return 1 if has_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
