"""The Pod Security Standards of Kubernetes, as rules: what a namespace that enforces `restricted` refuses in a pod.

The controls and the allowed values are those of https://kubernetes.io/docs/concepts/security/pod-security-standards/
for Linux, `baseline` and `restricted` together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"),
}
_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
    "secret",
}
_SECCOMP = {"RuntimeDefault", "Localhost"}


def refused(spec: Mapping[str, Any]) -> list[str]:
    """Why `restricted` refuses a pod of this specification: the controls that it violates; none is as it should be."""
    containers = [
        container
        for kind in ("initContainers", "containers", "ephemeralContainers")
        for container in spec.get(kind, [])
    ]
    return [*_of_pod(spec), *(why for container in containers for why in _of_container(container, spec))]


def _of_pod(spec: Mapping[str, Any]) -> Iterator[str]:
    pod = spec.get("securityContext", {})
    yield from (f"host namespaces: {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key))
    for volume in spec.get("volumes", []):
        yield from (f"volume types: {kind}" for kind in volume if kind != "name" and kind not in _VOLUMES)
    yield from (f"sysctls: {each['name']}" for each in pod.get("sysctls", []) if each["name"] not in _SYSCTLS)
    yield from _everywhere(pod)


def _of_container(container: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[str]:
    own, pod = container.get("securityContext", {}), spec.get("securityContext", {})
    capabilities = own.get("capabilities", {})
    yield from _everywhere(own)
    if own.get("privileged"):
        yield "privileged containers"
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities: ALL is not dropped"
    yield from (f"capabilities: {added}" for added in capabilities.get("add", []) if added != "NET_BIND_SERVICE")
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "host ports"
    if own.get("procMount", "Default") != "Default":
        yield "proc mount type"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "privilege escalation"
    for hook in (container.get("lifecycle", {}) | {"probe": container.get("livenessProbe", {})}).values():
        if any(part.get("host") for part in hook.values() if isinstance(part, dict)):
            yield "host probes and lifecycle hooks"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "running as non-root"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in _SECCOMP:
        yield "seccomp"


def _everywhere(context: Mapping[str, Any]) -> Iterator[str]:
    """What holds for the pod's own security context and for each container's."""
    if context.get("runAsUser") == 0:
        yield "running as non-root user"
    if context.get("runAsNonRoot") is False:
        yield "running as non-root"
    if context.get("seLinuxOptions", {}).get("type") not in _SELINUX_TYPES or any(
        context.get("seLinuxOptions", {}).get(key) for key in ("user", "role")
    ):
        yield "SELinux"
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in {"RuntimeDefault", "Localhost"}:
        yield "AppArmor"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "host process"
    if context.get("seccompProfile", {}).get("type", "RuntimeDefault") not in _SECCOMP:
        yield "seccomp"
