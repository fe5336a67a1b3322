"""Build the kustomizations of kuberay/ without kubectl: only the part of kustomize that they use.

A kustomization.yaml is applied in kustomize's order: resources, components, generated ConfigMaps,
patches, namespace, images, replacements. A key outside `_KEYS` is an error, because ignoring it
would change the result silently. Tests compare the result with the real kustomize where one is
installed.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import yaml

from nanoray.config.strict_yaml import YamlError, read_values
from nanoray.errors import ConfigError

Object = dict[str, Any]  # one Kubernetes object, as YAML has it

_KEYS = {
    "apiVersion",
    "kind",
    "resources",
    "components",
    "configMapGenerator",
    "patches",
    "namespace",
    "images",
    "replacements",
}
# Kinds that no namespace contains.
_CLUSTER_SCOPED = {
    "Namespace",
    "PersistentVolume",
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
}


def build(folder: Path) -> list[Object]:
    """Return the objects that `kubectl kustomize FOLDER` prints.

    Raises ConfigError for input that is not supported.
    """
    return _apply(folder.resolve(), [])


def read_objects(path: Path) -> list[Object]:
    """Return the objects of a YAML file with one or more documents. Raises ConfigError."""
    try:
        documents = read_values(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read manifest {path}: {error.strerror}; check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"manifest {path} is not YAML: {error}") from None
    except YamlError as error:
        raise ConfigError(f"manifest {path} {error}") from None
    objects = []
    for document in documents:
        if document is not None:  # two --- in a row
            # Uses of a YAML anchor share one object, so that a patch of one would change them all.
            objects.append(json.loads(json.dumps(document)))
    return objects


def _apply(folder: Path, objects: list[Object]) -> list[Object]:
    """Apply the kustomization of `folder` to `objects` (empty unless it is a component)."""
    documents = read_objects(folder / "kustomization.yaml")
    if len(documents) != 1:
        raise ConfigError(f"{folder}/kustomization.yaml has {len(documents)} documents; write one")
    rules = documents[0]
    unknown = rules.keys() - _KEYS
    if unknown:
        raise ConfigError(
            f"{folder}/kustomization.yaml uses {sorted(unknown)}, which is not supported here"
        )

    # What this folder brings: other folders and files, components, generated ConfigMaps.
    for name in rules.get("resources", ()):
        path = folder / name
        objects = objects + (build(path) if path.is_dir() else read_objects(path))
    for name in rules.get("components", ()):
        objects = _apply((folder / name).resolve(), objects)
    for rule in rules.get("configMapGenerator", ()):
        objects = [*objects, _config_map(folder, rule)]

    # What it changes, in the objects of the folders below it as well.
    for rule in rules.get("patches", ()):
        objects = _patched(objects, rule, folder)
    if "namespace" in rules:
        for thing in objects:
            if thing["kind"] not in _CLUSTER_SCOPED:
                thing.setdefault("metadata", {})["namespace"] = rules["namespace"]
    for rule in rules.get("images", ()):
        for thing in objects:
            _retag(thing, rule)
    for rule in rules.get("replacements", ()):
        _replace(objects, rule)
    return objects


def _config_map(folder: Path, rule: Object) -> Object:
    """Return the ConfigMap of a configMapGenerator. Raises ConfigError for one with a hash."""
    options = rule.get("options", {})
    if not options.get("disableNameSuffixHash"):
        raise ConfigError(
            f"configMapGenerator {rule['name']}: only with disableNameSuffixHash: true"
        )
    data = {}
    for literal in rule.get("literals", ()):
        key, value = literal.split("=", 1)
        data[key] = value
    for entry in rule.get("files", ()):
        key, _, name = entry.rpartition("=")  # KEY=FILE, or FILE alone
        data[key or Path(name).name] = (folder / name).read_text(encoding="utf-8")
    metadata = {"name": rule["name"]}
    if "namespace" in rule:
        metadata["namespace"] = rule["namespace"]
    if "labels" in options:
        metadata["labels"] = dict(options["labels"])
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patched(objects: list[Object], rule: Object, folder: Path) -> list[Object]:
    """Apply a patch in place, or return the objects without those that it deletes."""
    try:
        documents = read_values(rule["patch"])
    except YamlError as error:
        raise ConfigError(f"a patch of {folder}/kustomization.yaml {error}") from None
    if len(documents) != 1:
        raise ConfigError(
            f"a patch of {folder}/kustomization.yaml has {len(documents)} documents; write one"
        )
    patch = documents[0]
    target = rule["target"]
    selected = [thing for thing in objects if _is_selected(thing, target)]
    if not selected:
        raise ConfigError(
            f"{folder}/kustomization.yaml patches {target}, which is not among its objects"
        )
    if isinstance(patch, dict) and patch.get("$patch") == "delete":
        return [thing for thing in objects if thing not in selected]
    if not isinstance(patch, list):
        raise ConfigError(
            f"{folder}/kustomization.yaml: only JSON patches and $patch: delete are supported here"
        )
    for thing in selected:
        for operation in patch:
            json_patch(thing, operation)
    return objects


def _is_selected(thing: Object, target: Object) -> bool:
    metadata = thing.get("metadata", {})
    values = {
        "kind": thing["kind"],
        "name": metadata.get("name"),
        "namespace": metadata.get("namespace"),
    }
    return all(values.get(key) == wanted for key, wanted in target.items())


def json_patch(thing: Object, operation: Object) -> None:
    """Apply one add, replace or remove of RFC 6902 in place.

    Raises ConfigError for a path that does not exist, and for another operation.
    """
    op = operation["op"]
    path = operation["path"]
    # A key may contain a slash, which the path spells ~1, and a tilde, which it spells ~0.
    keys = [key.replace("~1", "/").replace("~0", "~") for key in path.split("/")[1:]]
    try:
        parent: Any = thing
        for key in keys[:-1]:
            parent = parent[int(key)] if isinstance(parent, list) else parent[key]

        last: Any = keys[-1]
        if isinstance(parent, list):
            last = len(parent) if last == "-" else int(last)  # - is the place after the end
        if op in ("replace", "remove"):
            parent[last]  # must exist, which a dict's assignment would not notice

        if op == "remove":
            del parent[last]
        elif op == "add" and isinstance(parent, list):
            parent.insert(last, copy.deepcopy(operation["value"]))
        elif op in ("add", "replace"):
            parent[last] = copy.deepcopy(operation["value"])
        else:
            raise ConfigError(
                f"patch operation {op} is not supported here; use add, replace or remove"
            )
    except (KeyError, IndexError, ValueError, TypeError):
        name = f"{thing['kind']} {thing['metadata']['name']}"
        raise ConfigError(f"{op} {path} leads nowhere in {name}") from None


def containers(thing: Any) -> list[Object]:
    """Return every container and init container in `thing`, at any depth."""
    found: list[Object] = []
    if isinstance(thing, list):
        for item in thing:
            found += containers(item)
    if not isinstance(thing, dict):
        return found

    # Those of this pod, then those of objects inside it: a RayJob has pod templates of groups.
    for key in ("initContainers", "containers"):
        for container in thing.get(key) or ():
            if isinstance(container, dict):
                found.append(container)
    for key, value in thing.items():
        if "ontainers" not in key:  # initContainers and containers
            found += containers(value)
    return found


def _retag(thing: Object, rule: Object) -> None:
    """Give containers with the rule's image its new name and tag."""
    for container in containers(thing):
        image = container.get("image", "")
        name = re.sub(r"(:[^:/@]+)?(@.+)?$", "", image)  # without tag and digest
        if name == rule["name"]:
            old_tag = image[len(name) + 1 :]
            tag = str(rule.get("newTag", old_tag))
            container["image"] = rule.get("newName", name)
            if tag:
                container["image"] += f":{tag}"


def _replace(objects: list[Object], rule: Object) -> None:
    """Copy a field of one object to fields of others. Raises ConfigError for a missing one."""
    selector = {key: value for key, value in rule["source"].items() if key != "fieldPath"}
    sources = [thing for thing in objects if _is_selected(thing, selector)]
    if len(sources) != 1:
        raise ConfigError(
            f"a replacement needs one source; {selector} selects {len(sources)} objects"
        )
    value: Any = sources[0]
    for key in rule["source"].get("fieldPath", "metadata.name").split("."):
        value = value[key]

    for target in rule["targets"]:
        for thing in objects:
            if _is_selected(thing, target["select"]):
                for path in target["fieldPaths"]:
                    _set_field(thing, path.split("."), copy.deepcopy(value))


def _set_field(thing: Object, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        thing = thing[key]
    if keys[-1] not in thing:
        raise ConfigError(f"a replacement's target has no field {'.'.join(keys)}")
    thing[keys[-1]] = value


# Kinds that others refer to, in the order in which they must exist. All others come after them.
_ORDER = (
    "Namespace",
    "ServiceAccount",
    "ConfigMap",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "ResourceClaimTemplate",
    "NetworkPolicy",
)


def to_yaml(objects: list[Object]) -> str:
    """Write objects as YAML documents, dependencies first."""

    def position(thing: Object) -> int:
        if thing["kind"] in _ORDER:
            return _ORDER.index(thing["kind"])
        return len(_ORDER)

    documents = []
    for thing in sorted(objects, key=position):
        documents.append(yaml.safe_dump(thing, sort_keys=False, width=110))
    return "---\n".join(documents)
