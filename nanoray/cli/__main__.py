"""`python -m nanoray.cli` prints docs/flags.md."""

from nanoray.cli.page import to_markdown

if __name__ == "__main__":
    print(to_markdown())
