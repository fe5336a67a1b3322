"""What a run is asked to do: keys, conflicts between them, presets, topologies, the layout of ranks.

Other rooms import these names from `nanoray.config`. A file of this folder has the keys of one
group; schema.py joins them to `Config`; conflicts.py is the table of what does not go together.
"""

from nanoray.config.batch_sizes import Batch as Batch
from nanoray.config.batch_sizes import batch_for as batch_for
from nanoray.config.batch_sizes import micro_batches as micro_batches
from nanoray.config.batch_sizes import resolve_batch as resolve_batch
from nanoray.config.kube import Kube as Kube
from nanoray.config.load import did_you_mean as did_you_mean
from nanoray.config.load import make_config as make_config
from nanoray.config.load import read_yaml as read_yaml
from nanoray.config.load import refuse_unknown as refuse_unknown
from nanoray.config.load import refuse_unknown_key as refuse_unknown_key
from nanoray.config.merge import DEFAULT_PRESET as DEFAULT_PRESET
from nanoray.config.merge import load_config as load_config
from nanoray.config.merge import load_settings as load_settings
from nanoray.config.merge import preset_names as preset_names
from nanoray.config.schema import Config as Config
from nanoray.config.schema import field_extra as field_extra
from nanoray.config.schema import recipe_of as recipe_of
from nanoray.config.settings import Settings as Settings

# Embeddings are padded to a multiple of this many rows: matrix products are fast at round sizes
VOCAB_MULTIPLE = 64
