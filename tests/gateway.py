"""The reverse proxy of the deployment guide, and what a deployment's secrets are."""

import http.client
import posixpath
import re
import ssl
import threading
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import cast
from urllib.parse import unquote

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

GUIDE = (Path(__file__).parent.parent / "docs" / "deployment.md").read_text()
(BLOCK,) = re.findall(r"```nginx\n(.*?)```", GUIDE, flags=re.DOTALL)
_LOCATION = re.compile(r"location (?P<prefix>/\S*) {(?P<body>[^}]*)}")
RULE = {found["prefix"]: found["body"] for found in _LOCATION.finditer(BLOCK)}


def forwards(target: str) -> str | None:
    """Return the path that nginx would forward, or None if it refuses.

    Like nginx it compares, and forwards, a path without escapes and dots.
    """
    path = unquote(target.partition("?")[0])
    path = posixpath.normpath(path).replace("//", "/") + "/" * path.endswith("/")
    prefix = max((one for one in RULE if path.startswith(one)), key=len)
    return path if "proxy_pass" in RULE[prefix] else None


def make_certificates(folder: Path) -> Path:
    """Write ca.crt, server.pem and server.key of an authority of its own."""
    folder.mkdir()
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [_name("authority"), _name("federation.example.org")]
    for number, file in enumerate(("ca.crt", "server.pem")):
        builder = (
            x509.CertificateBuilder()
            .issuer_name(names[0])
            .subject_name(names[number])
            .public_key(keys[number].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.now() - timedelta(days=2))
            .not_valid_after(datetime.now() + timedelta(days=2))
            .add_extension(x509.BasicConstraints(number == 0, None), True)
        )
        if number:
            local = x509.IPAddress(ip_address("127.0.0.1"))
            hosts = [x509.DNSName("federation.example.org"), local]
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), False)
        signed = builder.sign(keys[0], hashes.SHA256())
        (folder / file).write_bytes(signed.public_bytes(form.Encoding.PEM))
    text = keys[1].private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    )
    (folder / "server.key").write_bytes(text)
    return folder


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def make_key(path: Path) -> Path:
    """Write a node's key pair, as ssh-keygen does."""
    key = ec.generate_private_key(ec.SECP384R1())
    text = key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()
    )
    path.write_bytes(text)
    public = key.public_key().public_bytes(
        form.Encoding.OpenSSH, form.PublicFormat.OpenSSH
    )
    path.with_suffix(".pub").write_bytes(public)
    return path


class Gateway(ThreadingHTTPServer):
    """Forwards what the guide's rule lets through, and records all that passes.

    TLS ends here and begins again, as at nginx.
    """

    daemon_threads = True

    def __init__(self, upstream: str, certificates: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarder)
        inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        inside.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        self.socket = inside.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )
        self.upstream = upstream
        self.trust = ssl.create_default_context(cafile=certificates / "ca.crt")
        self.recorded: list[bytes] = []
        self.address = f"127.0.0.1:{self.server_port}"

    def __enter__(self) -> "Gateway":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()


class _Forwarder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.gateway = cast(Gateway, self.server)
        self.onward = http.client.HTTPSConnection(
            self.gateway.upstream, context=self.gateway.trust, timeout=60
        )

    def finish(self) -> None:
        super().finish()
        self.onward.close()

    def do_POST(self) -> None:  # noqa: N802 - named by the standard library
        body = self.rfile.read(int(self.headers["content-length"]))
        path = forwards(self.path)
        if path is None:
            self.send_error(403)
            return
        self.gateway.recorded += [self.path.encode(), bytes(self.headers), body]
        self.onward.request("POST", path, body, dict(self.headers))
        answer = self.onward.getresponse()
        content = answer.read()
        self.gateway.recorded += [bytes(answer.headers), content]
        self.send_response(answer.status)
        self.send_header("content-type", answer.headers["content-type"])
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args) -> None:
        del format, args
