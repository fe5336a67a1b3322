"""Build the kustomizations of kuberay/ without kubectl: only the part of kustomize that they use.

A kustomization.yaml is applied in kustomize's order: resources, components, generated ConfigMaps,
patches, namespace, images, replacements. A key outside `_KEYS` is an error, because ignoring it
would silently drop something. Tests compare the result with the real kustomize where one is
installed.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import yaml

from nanoray.errors import ConfigError

Object = dict[str, Any]  # one Kubernetes object, as YAML has it

_KEYS = {
    *("apiVersion", "kind", "resources", "components", "configMapGenerator"),
    *("patches", "namespace", "images", "replacements"),
}
_CLUSTER_SCOPED = {
    "Namespace",
    "PersistentVolume",
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
}


def build(folder: Path) -> list[Object]:
    """Return the objects that `kubectl kustomize FOLDER` prints. Raises ConfigError for unsupported
    input.
    """
    return _apply(folder.resolve(), [])


def read_objects(path: Path) -> list[Object]:
    """Return the objects of a YAML file with one or more documents."""
    try:
        found = [
            doc for doc in yaml.safe_load_all(path.read_text(encoding="utf-8")) if doc is not None
        ]
    except OSError as error:
        raise ConfigError(
            f"cannot read manifest {path}: {error.strerror}; check the path"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"manifest {path} is not YAML: {' '.join(str(error).split())}") from None
    # So that uses of a YAML anchor do not share one object
    return [json.loads(json.dumps(doc)) for doc in found]


def _apply(folder: Path, objects: list[Object]) -> list[Object]:
    """Apply the kustomization of `folder` to `objects` (empty unless it is a component)."""
    (rules,) = read_objects(folder / "kustomization.yaml")
    if unknown := rules.keys() - _KEYS:
        raise ConfigError(
            f"{folder}/kustomization.yaml uses {sorted(unknown)}, which is not supported here"
        )
    for name in rules.get("resources", ()):
        path = folder / name
        objects = objects + (build(path) if path.is_dir() else read_objects(path))
    for name in rules.get("components", ()):
        objects = _apply((folder / name).resolve(), objects)
    objects = objects + [_config_map(folder, rule) for rule in rules.get("configMapGenerator", ())]
    for rule in rules.get("patches", ()):
        objects = _patched(objects, rule, folder)
    for thing in objects if "namespace" in rules else ():
        if thing["kind"] not in _CLUSTER_SCOPED:
            thing.setdefault("metadata", {})["namespace"] = rules["namespace"]
    for rule in rules.get("images", ()):
        for thing in objects:
            _retag(thing, rule)
    for rule in rules.get("replacements", ()):
        _replace(objects, rule)
    return objects


def _config_map(folder: Path, rule: Object) -> Object:
    options = rule.get("options", {})
    if not options.get("disableNameSuffixHash"):
        raise ConfigError(
            f"configMapGenerator {rule['name']}: only with disableNameSuffixHash: true"
        )
    data = dict(literal.split("=", 1) for literal in rule.get("literals", ()))
    for entry in rule.get("files", ()):
        key, _, name = entry.rpartition("=")
        data[key or Path(name).name] = (folder / name).read_text(encoding="utf-8")
    metadata = {"name": rule["name"]}
    if "namespace" in rule:
        metadata["namespace"] = rule["namespace"]
    if "labels" in options:
        metadata["labels"] = dict(options["labels"])
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patched(objects: list[Object], rule: Object, folder: Path) -> list[Object]:
    patch, target = yaml.safe_load(rule["patch"]), rule["target"]
    hit = [thing for thing in objects if _selected(thing, target)]
    if not hit:
        raise ConfigError(
            f"{folder}/kustomization.yaml patches {target}, which is not among its objects"
        )
    if isinstance(patch, dict) and patch.get("$patch") == "delete":
        return [thing for thing in objects if thing not in hit]
    if not isinstance(patch, list):
        raise ConfigError(
            f"{folder}/kustomization.yaml: only JSON patches and $patch: delete are supported here"
        )
    for thing in hit:
        for operation in patch:
            json_patch(thing, operation)
    return objects


def _selected(thing: Object, target: Object) -> bool:
    metadata = thing.get("metadata", {})
    found = {
        "kind": thing["kind"],
        "name": metadata.get("name"),
        "namespace": metadata.get("namespace"),
    }
    return all(found.get(key) == value for key, value in target.items())


def json_patch(thing: Object, operation: Object) -> None:
    """Apply one add, replace or remove of RFC 6902 in place. Raises ConfigError for a path that
    does not exist.
    """
    keys = [key.replace("~1", "/").replace("~0", "~") for key in operation["path"].split("/")[1:]]
    place: Any = thing
    try:
        for key in keys[:-1]:
            place = place[int(key) if isinstance(place, list) else key]
        last: Any = keys[-1]
        if isinstance(place, list):
            last = len(place) if last == "-" else int(last)
        if operation["op"] in ("replace", "remove"):
            place[last]  # must exist
        if operation["op"] == "remove":
            del place[last]
        elif operation["op"] == "add" and isinstance(place, list):
            place.insert(last, copy.deepcopy(operation["value"]))
        elif operation["op"] in ("add", "replace"):
            place[last] = copy.deepcopy(operation["value"])
        else:
            raise ConfigError(
                f"patch operation {operation['op']} is not supported here; use add, replace or "
                "remove"
            )
    except (KeyError, IndexError, ValueError, TypeError):
        name = f"{thing['kind']} {thing['metadata']['name']}"
        raise ConfigError(
            f"{operation['op']} {operation['path']} leads nowhere in {name}"
        ) from None


def containers(thing: Any) -> list[Object]:
    """Return every container and init container in `thing`, at any depth."""
    if isinstance(thing, list):
        return [c for item in thing for c in containers(item)]
    if not isinstance(thing, dict):
        return []
    own = [
        c
        for key in ("initContainers", "containers")
        for c in thing.get(key) or ()
        if isinstance(c, dict)
    ]
    return own + [
        c for key, value in thing.items() if "ontainers" not in key for c in containers(value)
    ]


def _retag(thing: Object, rule: Object) -> None:
    for container in containers(thing):
        name = re.sub(r"(:[^:/@]+)?(@.+)?$", "", container.get("image", ""))
        if name == rule["name"]:
            old_tag = container["image"][len(name) + 1 :]
            tag = str(rule.get("newTag", old_tag))
            container["image"] = rule.get("newName", name) + (f":{tag}" if tag else "")


def _replace(objects: list[Object], rule: Object) -> None:
    source = {k: v for k, v in rule["source"].items() if k != "fieldPath"}
    hits = [thing for thing in objects if _selected(thing, source)]
    if len(hits) != 1:
        raise ConfigError(f"a replacement needs one source; {source} selects {len(hits)} objects")
    value: Any = hits[0]
    for key in rule["source"].get("fieldPath", "metadata.name").split("."):
        value = value[key]
    for target in rule["targets"]:
        for thing in objects:
            for path in target["fieldPaths"] if _selected(thing, target["select"]) else ():
                _set(thing, path.split("."), copy.deepcopy(value))


def _set(thing: Object, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        thing = thing[key]
    if keys[-1] not in thing:
        raise ConfigError(f"a replacement's target has no field {'.'.join(keys)}")
    thing[keys[-1]] = value


_ORDER = (
    "Namespace",
    "ServiceAccount",
    "ConfigMap",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "NetworkPolicy",
)


def to_yaml(objects: list[Object]) -> str:
    """Write objects as YAML documents, dependencies first."""

    def rank(thing: Object) -> int:
        return _ORDER.index(thing["kind"]) if thing["kind"] in _ORDER else len(_ORDER)

    return "---\n".join(
        yaml.safe_dump(thing, sort_keys=False, width=110) for thing in sorted(objects, key=rank)
    )
