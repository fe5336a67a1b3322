"""Commands and flags; how a run is opened; its dry run and forecast.

Other rooms import these names from `nanoray.cli`. `python -m nanoray.cli` prints docs/flags.md.
"""

from nanoray.checkpoint.which_run import RUNS as RUNS
from nanoray.checkpoint.which_run import add_run as add_run
from nanoray.checkpoint.which_run import find_run_folder as find_run_folder
from nanoray.cli.commands import exit_code_of as exit_code_of
from nanoray.cli.commands import require_script as require_script
from nanoray.cli.commands import run_command as run_command
from nanoray.cli.commands import run_subcommand as run_subcommand
from nanoray.cli.commands import writing as writing
from nanoray.cli.flags import Loaded as Loaded
from nanoray.cli.flags import Scale as Scale
from nanoray.cli.flags import parse_args as parse_args
from nanoray.cli.parsers import Parser as Parser
from nanoray.cli.parsers import flag_names as flag_names
from nanoray.cli.parsers import name_program as name_program
from nanoray.cli.parsers import tool_parser as tool_parser
from nanoray.cli.signals import STOP_SIGNALS as STOP_SIGNALS
from nanoray.cli.signals import stop_signals as stop_signals
