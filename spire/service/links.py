"""Detection of Kubernetes service links: the addresses of a namespace's Services in the environment of each pod.

A Service named spire-gateway sets SPIRE_GATEWAY_PORT=tcp://10.0.0.1:8000, which collides with the gateway's `--port`.
"""

from __future__ import annotations

import os
import re

_LINK = re.compile(r"(tcp|udp|sctp)://\S+")


def explain_link(variable: str) -> str:
    """Return an error message if the environment variable holds a Kubernetes service link, else ""."""
    value = os.environ.get(variable, "")
    if not _LINK.fullmatch(value):
        return ""
    service = variable.removesuffix("_PORT").lower().replace("_", "-")
    return (
        f"{variable}={value} looks like the link to a Kubernetes Service named {service}, not like a port: set "
        f"enableServiceLinks: false in the pod, set {variable} there, or rename the Service"
    )
