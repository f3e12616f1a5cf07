"""Ray Serve: ``serve.yaml``, which starts the artifact's server on a cluster.

The file names the artifact's folder, which is not copied: every node reads it there.
"""

from __future__ import annotations

from pathlib import Path

from linexport.errors import UsageError
from linexport.package.destination import Destination, Packaged, Packaging
from linexport.sources.files import check_text
from linexport.system.escape import yaml_string

APPLICATION = "linexport.serving.ray:app"
SLOTS = 16

TEMPLATE = """\
# Start it on this machine:     serve run serve.yaml
# or on a cluster that runs:    serve deploy serve.yaml
http_options:
  host: 127.0.0.1  # 0.0.0.0 is reached from elsewhere: set a token_file then
  port: 8000
applications:
- name: {name}
  route_prefix: /
  import_path: {application}
  args:  # and every option of linexport serve that is a limit, such as max_tokens
    artifact: {artifact}  # the same path on every node
    name: {name}
    slots: {slots}  # sequences that one replica advances together
    threads: {threads}  # of one replica
  deployments:
  - name: Model
    ray_actor_options:
      num_cpus: {threads}
    max_ongoing_requests: {slots}
    autoscaling_config:
      min_replicas: {least}
      max_replicas: {most}
      target_ongoing_requests: {slots}  # answered and waiting, a replica: more start another one
"""


def _write(job: Packaging) -> Packaged:
    least = _number(job, "min-replicas", 1)
    most = _number(job, "max-replicas", max(4, least))
    if most < least:
        raise UsageError(f"max-replicas={most}: expected min-replicas, {least}, or more.")
    artifact = Path(job.options.get("artifact", job.source.absolute()))
    if not artifact.is_absolute():
        raise UsageError(f"artifact={artifact}: expected a path from /, the same on every node.")
    check_text(artifact)
    text = TEMPLATE.format(
        name=yaml_string(job.name),
        artifact=yaml_string(str(artifact)),
        application=APPLICATION,
        slots=_number(job, "slots", SLOTS),
        threads=_number(job, "threads", 1),
        least=least,
        most=most,
    )
    (job.folder / "serve.yaml").write_text(text, encoding="utf-8")
    return Packaged(notes=(f"Start it: serve run serve.yaml. It reads {artifact}.",))


def _number(job: Packaging, name: str, usual: int) -> int:
    value = job.options.get(name, str(usual))
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{name}={value}: expected a positive integer.")
    return int(value)


OPTIONS = {
    "artifact": "path of the artifact on the nodes; its own without",
    "min-replicas": "replicas that always run; 1",
    "max-replicas": "replicas that run when requests wait; 4",
    "slots": "sequences that one replica advances together; 16",
    "threads": "threads, and CPUs, of one replica; 1",
}

DESTINATION = Destination("ray", "serve.yaml of Ray Serve.", _write, OPTIONS, True)
