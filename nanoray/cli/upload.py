"""`nanoray checkpoint upload [RUN] [URL]`: copy a run's checkpoints and records to object storage by hand.

It sends what is on disk and not there yet. URL: that of the run's own key `upload` by default. Exit 0
when all is there, 1 when not.
"""

from __future__ import annotations

from nanoray.checkpoint.upload.send import RunCopy
from nanoray.cli import add_run, exit_code_of, find_run_folder, name_program, tool_parser
from nanoray.config.load import read_mapping
from nanoray.errors import ConfigError
from nanoray.machine.storage.store import StorageError
from nanoray.machine.storage.url import problem_of


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return exit_code_of(lambda: _upload(argv))


def _upload(argv: list[str] | None) -> int:
    parser = tool_parser(name_program("checkpoint upload"), __doc__)
    add_run(parser)
    parser.add_argument("url", nargs="?", default="", help="where the runs are [the run's own]")
    args = parser.parse_args(argv)
    run = find_run_folder(args.run).resolve()
    url = args.url or str(read_mapping(run / "config.json").get("upload") or "")
    if not url:
        raise ConfigError(f"the run {run} has no key upload; give the URL, too")
    problem = problem_of("URL", url)
    if problem:
        raise ConfigError(problem)
    try:
        copy = RunCopy(run, url)
        copy.update(is_last=True)
    except StorageError as error:
        print(f"FAILED  {error}")
        return 1
    print(f"{copy.store.url}: all is there, newest {copy.newest}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
