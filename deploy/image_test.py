"""Builds both images and runs them as in the local overlay, without a cluster or a daemon.

`make image-test`, as root on Debian: buildah builds the targets of deploy/Containerfile; podman
runs a learner, two actors and an evaluator as specified by their manifests (user, read-only root,
no capabilities, limits, volumes, arguments), until Catch is learned. Then it checks the limits that
the kernel enforces, and ends them with SIGTERM. The output is for docs/results/images.md.
Everything it made is removed at the end, except the Debian packages of the tools. It temporarily
needs some 20 GB of disk, and downloads the GPU libraries, which takes longest.

Differences from a cluster: the learner runs from its own image, although the overlay has one image
for all, so that both are tested. Unless `--base` names the official Python image, which must come
from a registry, Debian's own Python replaces it. A pod's network reaches the learner and nothing
else. A container's first process is the program, also where a pod would have its own. Nothing
restarts: a container that ends by itself is a failure.
"""

import argparse
import ast
import collections
import configparser
import contextlib
import json
import os
import pathlib
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import yaml

Object = dict[str, Any]  # a Kubernetes object, or a part of one

ROOT = pathlib.Path(__file__).resolve().parent.parent
KUBECTL = pathlib.Path(sys.executable).parent / "kubectl"
PACKAGES = {  # command -> the Debian package that has it
    "buildah": "buildah",
    "podman": "podman",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
}
BASE = "localhost/impala-python:3.11-bookworm"  # replaces the official image
BASE_PACKAGES = ("ca-certificates", "python-is-python3", "python3-pip")
BASE_PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"  # as in the official one
PIP_SETTINGS = (  # where packages come from
    *("index-url", "extra-index-url", "find-links", "no-index", "trusted-host"),
    *("cert", "client-cert", "proxy", "retries", "timeout", "default-timeout"),
)
PROCESSES = 1024  # threads included; a kubelet's setting, so in no manifest
TRAINING_SECONDS = 900.0  # Catch takes half a minute, but four TensorFlows start beside it
BUILD_SECONDS = 3600.0
READER = "/etc/impala/tokens/reader"  # as in docs/kubernetes.md


class Failure(Exception):
    """A failure with a message for the user."""


class Container(NamedTuple):
    """A pod's only container, to be run by podman."""

    name: str
    image: str
    spec: Object  # of the pod
    folder: pathlib.Path  # holds its volumes and its log

    @property
    def own(self) -> Object:
        return self.spec["containers"][0]

    @property
    def log(self) -> pathlib.Path:
        return self.folder / "log"


# Commands.


def call(*words: object, seconds: float = 60.0, show: bool = False) -> str:
    """Runs a command and returns its output.

    Args:
      *words: the command.
      seconds: after which it is killed, with its children.
      show: print the output instead of returning it.
    """
    command = [str(word) for word in words]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show else subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise Failure(f"{command[0]} cannot be run: {error}") from error
    with process:
        try:
            output, complaint = process.communicate(timeout=seconds)
        except BaseException as error:  # Ctrl-C and SIGTERM as well: leave nobody behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Failure(f"{shlex.join(command)}: not done in {seconds:.0f} s") from error
            raise
    if process.returncode:
        raise Failure(f"{shlex.join(command)}: status {process.returncode}. {complaint or ''}")
    return (output or "").strip()


def succeeds(*words: object, seconds: float = 60.0, show: bool = False) -> bool:
    """Returns whether a command succeeds."""
    try:
        call(*words, seconds=seconds, show=show)
    except Failure:
        return False
    return True


def wait_for(what: str, condition: Callable[[], bool], seconds: float) -> None:
    """Waits until the condition holds. Raises Failure if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Failure(f"Waited {seconds:.0f} s in vain for {what}.")
        time.sleep(2.0)


def install() -> None:
    """Installs missing tools. Raises Failure if that is not possible."""
    missing = [name for command, name in PACKAGES.items() if shutil.which(command) is None]
    if os.geteuid() != 0:
        wanted = f" It would install {', '.join(missing)}." if missing else ""
        raise Failure(f"Only root may mount images and join networks: run it as root.{wanted}")
    if missing and shutil.which("apt-get") is None:
        raise Failure(f"These are missing, and there is no apt-get: {', '.join(missing)}.")
    if missing:
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        succeeds("apt-get", "update", "--quiet", seconds=300.0, show=True)  # old lists may do
        options = ("--quiet", "--yes", "--no-install-recommends")
        call("apt-get", "install", *options, *missing, seconds=900.0, show=True)


# A place for images and containers.


@contextlib.contextmanager
def workshop(keep: pathlib.Path | None) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """Makes temporary storage for images and containers, separate from this machine's.

    Yields:
      A directory for large data, which may be kept; and one for runtime state, which is removed,
      with a short path as podman requires.
    """
    with contextlib.ExitStack() as last_first:
        if keep is None:
            place = pathlib.Path(tempfile.mkdtemp(prefix="impala-", dir="/var/tmp"))
            last_first.callback(remove, place)
        else:
            place = keep.resolve()
            place.mkdir(parents=True, exist_ok=True)
            last_first.callback(unmount, place)
        state = pathlib.Path(tempfile.mkdtemp(prefix="impala-", dir="/run"))
        last_first.callback(remove, state)
        # What podman remembers of an earlier run's containers, which are gone.
        shutil.rmtree(place / "storage" / "libpod", ignore_errors=True)
        limits = [
            "{0}={1}:{1}".format(name, min(*resource.getrlimit(number), most))
            for name, number, most in (
                ("nofile", resource.RLIMIT_NOFILE, 2**20),
                ("nproc", resource.RLIMIT_NPROC, 2**15),  # what buildah has lowered its own to
            )
        ]
        (state / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{place}/storage"\n'
            f'runroot = "{state}/run"\n'
        )
        # Our own limits, because raising them is a privilege that root may lack; no journal, no
        # systemd, no setting of the kernel's, and locks that are not those of other containers.
        (state / "containers.conf").write_text(
            "[containers]\n"
            f"default_ulimits = {json.dumps(limits)}\n"
            'default_sysctls = []\nlog_driver = "k8s-file"\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            f'lock_type = "file"\ntmp_dir = "{state}/libpod"\n'
        )
        os.environ |= {
            "CONTAINERS_STORAGE_CONF": str(state / "storage.conf"),
            "CONTAINERS_CONF": str(state / "containers.conf"),
            "BUILDAH_ISOLATION": "chroot",
        }
        yield place, state


def unmount(directory: pathlib.Path) -> bool:
    """Unmounts everything in a directory. Returns whether nothing is left."""

    def mounted() -> list[str]:
        lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        points = [line.split()[4] for line in lines]
        return [point for point in points if pathlib.Path(point).is_relative_to(directory)]

    for point in reversed(mounted()):
        subprocess.run(["umount", point], check=False, timeout=60.0)
    return not mounted()


def remove(directory: pathlib.Path) -> None:
    """Deletes a directory, but nothing that is mounted in it."""
    if not unmount(directory):
        raise Failure(f"{directory} is still in use: unmount what is in it, and delete it.")
    shutil.rmtree(directory, ignore_errors=True)


# Images.


def debian_mirror() -> str:
    """Returns the mirror that apt uses for Debian."""
    fields = ("Created-By: Packages", "Label: Debian", "Component: main")
    found = call("apt-get", "indextargets", "--format", "$(REPO_URI)", *fields).split()
    if not found:
        raise Failure("apt knows no mirror of Debian. Name a Python image with --base.")
    return found[0]


def make_base(place: pathlib.Path) -> None:
    """Makes the replacement of the official image: a minimal Debian that runs pip."""
    tree, archive = place / "debian", place / "debian.tar"
    try:
        options = ("--variant=minbase", f"--include={','.join(BASE_PACKAGES)}")
        suite = "bookworm"
        call("debootstrap", *options, suite, tree, debian_mirror(), seconds=1200.0, show=True)
        left_out = ("dev", "proc", "sys", "tmp", "var/cache/apt", "var/lib/apt/lists")
        excluded = [f"--exclude=./{name}/*" for name in left_out]
        call("tar", "--create", "--file", archive, "--directory", tree, *excluded, ".", seconds=300)
        call("podman", "import", "--change", f"ENV PATH={BASE_PATH}", archive, BASE, seconds=300)
    finally:
        remove(tree)
        archive.unlink(missing_ok=True)


def pip_volumes(state: pathlib.Path) -> list[str]:
    """Returns volumes with which pip in a build uses this machine's package sources."""
    pythons = (sys.executable, f"{sys.base_prefix}/bin/python3")  # some environments have no pip
    python = next((each for each in pythons if succeeds(each, "-m", "pip", "--version")), None)
    listed = call(python, "-m", "pip", "config", "list") if python else ""
    sections: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if name in PIP_SETTINGS:
            sections[section][name] = str(ast.literal_eval(value))
    sections["global"] |= sections.pop(":env:", {})  # the environment has the last word
    settings = configparser.ConfigParser(interpolation=None)
    settings.read_dict(sections)
    with open(state / "pip.conf", "w", encoding="utf-8") as file:
        settings.write(file)
    local = set()
    for word in " ".join(value for each in sections.values() for value in each.values()).split():
        path = pathlib.Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # The pages of an index link to files beside them.
            local.add(path.parent if word.startswith("file:") else path)
    return [
        f"--volume={state}/pip.conf:/etc/pip.conf:ro",
        *[f"--volume={path}:{path}:ro" for path in sorted(local)],
    ]


def build(image: str, target: str, base: str, volumes: Sequence[str]) -> None:
    """Builds a target of the Containerfile."""
    call(
        *("buildah", "build", "--layers", "--pull=false", "--network=host"),
        *volumes,
        *("--build-arg", f"PYTHON_IMAGE={base}"),
        *("--file", ROOT / "deploy" / "Containerfile", "--target", target, "--tag", image),
        ROOT,
        seconds=BUILD_SECONDS,
        show=True,
    )


def build_all(
    place: pathlib.Path, state: pathlib.Path, base: str | None, version: str
) -> tuple[dict[str, str], list[str]]:
    """Builds base and images.

    Returns:
      The names of the images by target; and rows for the report.
    """
    started = time.monotonic()
    rows = []

    def done(name: str) -> None:
        nonlocal started
        size = int(call("podman", "image", "inspect", "--format", "{{.Size}}", name))
        seconds = time.monotonic() - started
        rows.append(f"| `{name}` | {size / 1e6:,.0f} MB | {seconds:.0f} s |")
        started = time.monotonic()

    if base is None:
        if not succeeds("podman", "image", "exists", BASE):
            make_base(place)
        done(BASE)
    volumes = pip_volumes(state)
    images = {target: f"localhost/impala-{target}:{version}" for target in ("actor", "learner")}
    for target, image in images.items():
        build(image, target, base or BASE, volumes)
        done(image)
    return images, rows


# Containers.


def render() -> list[Object]:
    """Returns the objects of the local overlay."""
    rendered = call(KUBECTL, "kustomize", ROOT / "deploy" / "overlays" / "local")
    return list(yaml.safe_load_all(rendered))


def pods_of(objects: Sequence[Object]) -> dict[str, Object]:
    """Returns the specification of each component's pods."""
    templates = [each["spec"]["template"] for each in objects if "template" in each.get("spec", {})]
    return {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]
        for each in templates
    }


def files_of(objects: Sequence[Object]) -> dict[str, dict[str, str]]:
    """Returns files of ConfigMaps, and of the Secrets that docs/kubernetes.md describes."""
    maps = {each["metadata"]["name"]: each["data"] for each in objects if "data" in each}
    tokens = {role: f"{role} {os.urandom(32).hex()}\n" for role in ("actor", "evaluator", "reader")}
    return maps | {
        "impala-learner-tokens": {"tokens": "".join(tokens.values()), "reader": tokens["reader"]},
        "impala-actor-token": {"token": tokens["actor"]},
        "impala-evaluator-token": {"token": tokens["evaluator"]},
    }


def volumes_of(container: Container, files: dict[str, dict[str, str]]) -> Iterator[str]:
    """Lays out a pod's volumes as a kubelet does. Yields the flags that mount them."""
    group = container.spec["securityContext"]["fsGroup"]
    volumes = {volume["name"]: volume for volume in container.spec["volumes"]}
    for mount in container.own["volumeMounts"]:
        volume = volumes.get(mount["name"], {})  # nothing: a claim, which is writable as /tmp is
        source = volume.get("configMap") or volume.get("secret")
        folder = container.folder / mount["name"]
        folder.mkdir()
        os.chown(folder, 0, group)
        folder.chmod(0o755 if source else 0o2775)
        if source:
            contents = files[source.get("name") or source["secretName"]]
            keys = {key: key for key in contents}
            if "items" in source:
                keys = {item["key"]: item["path"] for item in source["items"]}
            for key, path in keys.items():
                (folder / path).write_text(contents[key], encoding="utf-8")
                os.chown(folder / path, 0, group)
                (folder / path).chmod(source.get("defaultMode", 0o644))
        yield f"--volume={folder}:{mount['mountPath']}" + (":ro" if mount.get("readOnly") else "")


@contextlib.contextmanager
def networks(names: Sequence[str]) -> Iterator[list[str]]:
    """Makes a network for each, joined to the first one's, without access to the outside.

    Yields:
      The address of the first, as seen from each of the others.
    """
    addresses = []
    with contextlib.ExitStack() as last_first:
        for name in names:
            call("ip", "netns", "add", name)
            last_first.callback(call, "ip", "netns", "delete", name)
            call("ip", "-n", name, "link", "set", "lo", "up")
        first, *others = names
        for i, other in enumerate(others):
            # Addresses that are reserved for examples, four to a pair: nobody has them.
            ends = (
                (first, f"client{i}", f"192.0.2.{4 * i + 1}"),
                (other, "eth0", f"192.0.2.{4 * i + 2}"),
            )
            pair = ("add", f"client{i}", "type", "veth", "peer", "name", "eth0", "netns", other)
            call("ip", "-n", first, "link", *pair)
            for name, device, address in ends:
                call("ip", "-n", name, "address", "add", f"{address}/30", "dev", device)
                call("ip", "-n", name, "link", "set", device, "up")
            addresses.append(ends[0][2])
        yield addresses


def in_bytes(quantity: str) -> int:
    """Returns the bytes of a quantity such as 1536Mi."""
    return int(quantity[:-2]) << {"Ki": 10, "Mi": 20, "Gi": 30}[quantity[-2:]]


def start(
    container: Container, files: dict[str, dict[str, str]], network: str, hosts: Sequence[str]
) -> None:
    """Runs a container as specified by its pod."""
    user, own = container.spec["securityContext"], container.own
    limits, context = own["resources"]["limits"], own["securityContext"]
    memory = in_bytes(limits["memory"])
    escalation = context.get("allowPrivilegeEscalation", True)
    call(
        *("podman", "run", "--detach", "--pull=never", "--http-proxy=false"),
        *("--name", container.name, "--hostname", container.name),
        f"--network=ns:/run/netns/{network}",
        *[f"--add-host={host}" for host in hosts],
        f"--user={user['runAsUser']}:{user['runAsGroup']}",
        f"--read-only={str(context.get('readOnlyRootFilesystem', False)).lower()}",
        "--read-only-tmpfs=false",
        *[f"--cap-drop={name}" for name in context.get("capabilities", {}).get("drop", ())],
        *(["--security-opt=no-new-privileges"] if not escalation else []),
        *(f"--memory={memory}", f"--memory-swap={memory}", f"--cpus={limits['cpu']}"),
        f"--pids-limit={PROCESSES}",
        *[f"--env={each['name']}={each['value']}" for each in own.get("env", ())],
        *volumes_of(container, files),
        *("--log-opt", f"path={container.log}"),
        *("--entrypoint", json.dumps(own["command"])),
        container.image,
        *own["args"],
    )


def inspect(name: str, field: str) -> str:
    """Returns a field of podman's description of a container."""
    return call("podman", "inspect", "--type=container", "--format", f"{{{{.{field}}}}}", name)


def process_of(container: Container) -> tuple[int, dict[str, list[str]]]:
    """Returns the id of a container's first process, and its state in /proc."""
    pid = int(inspect(container.name, "State.Pid"))
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return pid, {key: value.split() for key, _, value in (line.partition(":") for line in lines)}


def limit_of(pid: int, controller: str, old_name: str, name: str) -> str:
    """Returns a process's limit, under either version of control groups."""
    lines = pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    groups = {which: path for _, which, path in (line.split(":", 2) for line in lines)}
    mounts = pathlib.Path("/sys/fs/cgroup")
    if controller in groups:
        path = mounts / controller / groups[controller][1:] / f"{controller}.{old_name}"
    else:
        path = mounts / groups[""][1:] / f"{controller}.{name}"
    return path.read_text().strip()


def confinement_complaints(container: Container) -> list[str]:
    """Returns how a container's confinement differs from its specification."""
    pid, status = process_of(container)
    user = container.spec["securityContext"]
    memory = in_bytes(container.own["resources"]["limits"]["memory"])
    mounts = pathlib.Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    roots = [mount[5] for mount in map(str.split, mounts) if mount[4] == "/"]
    sets = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    checks = (
        ("user", {*status["Uid"]}, {str(user["runAsUser"])}),
        ("group", {*status["Gid"]}, {str(user["runAsGroup"])}),
        ("capabilities", {int(status[name][0], 16) for name in sets}, {0}),
        ("no_new_privs", status["NoNewPrivs"], ["1"]),
        ("seccomp mode", status["Seccomp"], ["2"]),
        ("root", {options.split(",")[0] for options in roots}, {"ro"}),
        ("memory", limit_of(pid, "memory", "limit_in_bytes", "max"), str(memory)),
        ("number of processes", limit_of(pid, "pids", "max", "max"), str(PROCESSES)),
    )
    return [
        f"{container.name}: {what}: {found}, not {wanted}"
        for what, found, wanted in checks
        if found != wanted
    ]


def outcome(learner: Container, clients: Sequence[Container]) -> tuple[str, list[str]]:
    """Returns a sentence about the run's result for the report; and complaints."""
    complaints = []
    asked = ("impala", "status", "--json", f"--security.token-file={READER}")
    status = json.loads(call("podman", "exec", learner.name, *asked))
    roles = collections.Counter(member["role"] for member in status["members"])
    wanted = collections.Counter(
        "ROLE_EVALUATOR" if each.name == "evaluator" else "ROLE_ACTOR" for each in clients
    )
    if roles != wanted:
        complaints.append(f"learner: of its members it says {roles}, not {wanted}")
    states = sorted(learner.folder.rglob("checkpoints/[0-9]*/state.json"))
    if not states:
        return "There is no checkpoint.", [*complaints, "learner: it left no checkpoint"]
    frames = json.loads(states[-1].read_text())["counters"]["frames"]
    if str(frames) != status["frames"]:
        complaints.append(f"learner: its checkpoint has {frames} frames, not {status['frames']}")
    sentence = f"The last checkpoint is of {frames:,} frames."
    for evaluations in learner.folder.rglob("evaluations.jsonl"):
        if lines := evaluations.read_text().splitlines():
            returns = json.loads(lines[-1])["returns"]
            sentence += (
                f" The evaluator's last report: mean return {statistics.mean(returns):.2f} over "
                f"{len(returns)} episodes."
            )
    return sentence, complaints


def stop(container: Container) -> tuple[float, str]:
    """Stops a container as a kubelet does. Returns seconds and exit status."""
    grace = int(container.spec["terminationGracePeriodSeconds"])
    started = time.monotonic()
    call("podman", "stop", f"--time={grace}", container.name, seconds=grace + 60.0)
    seconds = time.monotonic() - started
    return seconds, inspect(container.name, "State.ExitCode")


@contextlib.contextmanager
def fleet(
    images: dict[str, str], objects: Sequence[Object], network: str
) -> Iterator[list[Container]]:
    """Yields the running containers, the learner first, and removes them afterwards.

    Args:
      images: by target.
      objects: the rendered manifests.
      network: prefix of the networks' names.
    """
    pods, files = pods_of(objects), files_of(objects)
    # The headless Service that actors dial leads to the learner's pod.
    (service,) = [
        each["metadata"]["name"]
        for each in objects
        if each["kind"] == "Service" and each["spec"].get("clusterIP") == "None"
    ]
    members = [("learner", "learner"), ("actor-1", "actor"), ("actor-2", "actor")]
    members += [("evaluator", "evaluator")] if "evaluator" in pods else []
    with contextlib.ExitStack() as last_first:
        folder = pathlib.Path(
            last_first.enter_context(tempfile.TemporaryDirectory(prefix="impala-"))
        )
        containers = [
            Container(name, images.get(component, images["actor"]), pods[component], folder / name)
            for name, component in members
        ]
        names = [f"{network}-{each.name}" for each in containers]
        addresses = last_first.enter_context(networks(names))
        last_first.callback(call, "podman", "rm", "--all", "--force", "--time=0", seconds=120.0)
        hosts = [[], *[[f"{service}:{address}"] for address in addresses]]
        try:
            for container, name, known in zip(containers, names, hosts, strict=True):
                container.folder.mkdir()
                start(container, files, name, known)
            yield containers
        except Failure:
            show_logs(containers)
            raise


def has_finished(containers: Sequence[Container]) -> bool:
    """Returns whether training has ended. Raises Failure if a container has ended, too."""
    running = call("podman", "ps", "--format", "{{.Names}}").split()
    for container in containers:
        if container.name not in running:
            code = inspect(container.name, "State.ExitCode")
            raise Failure(f"{container.name} ended by itself, with status {code}.")
    return "Finished: " in containers[0].log.read_text(encoding="utf-8", errors="replace")


def run_all(
    images: dict[str, str], objects: Sequence[Object], network: str
) -> tuple[list[str], list[str]]:
    """Runs the fleet from start to end.

    Returns:
      Lines for the report; and complaints.
    """
    started = time.monotonic()
    with fleet(images, objects, network) as containers:
        learner, *clients = containers
        wait_for("the end of training", lambda: has_finished(containers), TRAINING_SECONDS)
        seconds = time.monotonic() - started
        sentence, complaints = outcome(learner, clients)
        rows = []
        for container in reversed(containers):  # the learner last
            complaints += confinement_complaints(container)
            peak = int(process_of(container)[1]["VmHWM"][0]) / 1024  # of kB
            ended, code = stop(container)
            if code != "0":
                complaints.append(f"{container.name}: SIGTERM ended it with status {code}, not 0")
            rows.append(
                f"| {container.name} | {peak:,.0f} MiB "
                f"of {container.own['resources']['limits']['memory']} "
                f"| {code} | {ended:.1f} s of {container.spec['terminationGracePeriodSeconds']} s |"
            )
        if complaints:
            show_logs(containers)
    return [
        f"Training ended {seconds:.0f} s after the first container was started. {sentence}",
        "",
        "| container | memory at most | status on SIGTERM | after |",
        "|---|---|---|---|",
        *reversed(rows),
    ], complaints


def show_logs(containers: Sequence[Container]) -> None:
    """Prints the last lines of the logs."""
    for container in containers:
        if container.log.exists():
            lines = container.log.read_text(encoding="utf-8", errors="replace").splitlines()
            print(f"--- {container.name}", *lines[-20:], sep="\n", file=sys.stderr)


def main() -> int:
    """Runs the command line. Returns 1 if there is any complaint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base", metavar="IMAGE", help="the Python image, instead of a stand-in that is made here"
    )
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=pathlib.Path,
        help="leave the images in DIR: the next run builds only what has changed since",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        install()
        objects = render()
        version = pods_of(objects)["actor"]["containers"][0]["image"].partition(":")[2]
        with workshop(options.keep) as (place, state):
            images, rows = build_all(place, state, options.base, version)
            lines, complaints = run_all(images, objects, state.name)
            tools = ", ".join(
                " ".join(call(name, "--version").split()[:3]) for name in ("buildah", "podman")
            )
            print(
                f"`make image-test`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {tools}.",
                *("", "| image | size | built in |", "|---|---|---|", *rows, "", *lines),
                sep="\n",
                flush=True,
            )
    except Failure as error:
        print(f"image-test: {error}", file=sys.stderr)
        return 1
    for complaint in complaints:
        print(f"image-test: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
