"""An Android device for tests: what the real `adb` client connects to over loopback.

    python tests/emulated_device.py --root FOLDER --runner "qemu-aarch64 -cpu max"

Speaks the device's side of adb's protocol (packets of 24 bytes and a payload; see
system/core/adb/protocol.txt and SYNC.TXT of Android's sources): connection, shell (versions 1 and
2, with exit codes) and sync (stat, push, pull). Its /data/local/tmp lies in FOLDER. Executables for
ARM that are pushed run through the runner. Prints the port it listens on, then serves until killed.
"""

import argparse
import os
import queue
import shutil
import socketserver
import struct
import subprocess
import threading
from pathlib import Path
from typing import IO

VERSION = 0x01000001
MAX_PAYLOAD = 256 * 1024
# Without stat_v2 and sendrecv_v2, adb makes the simplest requests.
BANNER = b"device::ro.product.name=emulated;ro.product.model=Emulated;features=shell_v2,cmd"
TMP = "data/local/tmp"
ELF_AARCH64 = (b"\x7fELF", b"\xb7\x00")  # the magic, and e_machine at byte 18

HEADER = struct.Struct("<4s5I")  # command, two arguments, length, checksum, magic
SYNC_HEADER = struct.Struct("<4sI")
SHELL_HEADER = struct.Struct("<BI")
STDOUT, STDERR, EXIT = 1, 2, 3  # kinds of packets of shell version 2


class Stream:
    """One of the streams that share a connection; one packet is under way at a time."""

    def __init__(self, connection: "Connection", local: int, remote: int) -> None:
        self.connection, self.local, self.remote = connection, local, remote
        self.inbox: queue.Queue[bytes | None] = queue.Queue()
        self.may_send = threading.Semaphore(1)
        self.buffer = b""

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes.

        Raises:
            EOFError: where the client closes the stream before.
        """
        while len(self.buffer) < count:
            payload = self.inbox.get()
            if payload is None:
                raise EOFError
            self.buffer += payload
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def write(self, data: bytes) -> None:
        """Sends data, each packet after the one before was acknowledged."""
        for start in range(0, len(data), MAX_PAYLOAD):
            self.may_send.acquire()
            self.connection.send(b"WRTE", self.local, self.remote, data[start:][:MAX_PAYLOAD])


class Device(socketserver.ThreadingTCPServer):
    """The listening device."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, root: Path, runner: str, properties: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.root, self.runner, self.properties = root, runner, properties
        (root / TMP).mkdir(parents=True, exist_ok=True)

    def path(self, remote: str) -> Path:
        """Where a path of the device lies."""
        return self.root / remote.lstrip("/")


class Connection(socketserver.BaseRequestHandler):
    """The connection of one adb server."""

    server: Device

    def setup(self) -> None:
        self.sending = threading.Lock()
        self.streams: dict[int, Stream] = {}

    def send(self, command: bytes, first: int, second: int, payload: bytes = b"") -> None:
        magic = int.from_bytes(command, "little") ^ 0xFFFFFFFF
        with self.sending:  # this version of the protocol has no checksums
            header = HEADER.pack(command, first, second, len(payload), 0, magic)
            self.request.sendall(header + payload)

    def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.request.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def handle(self) -> None:
        try:
            while True:
                command, first, second, length, _, _ = HEADER.unpack(self.receive(HEADER.size))
                self.answer(command, first, second, self.receive(length))
        except (EOFError, ConnectionError):
            for stream in self.streams.values():
                stream.inbox.put(None)

    def answer(self, command: bytes, remote: int, local: int, payload: bytes) -> None:
        if command == b"CNXN":
            self.send(b"CNXN", VERSION, MAX_PAYLOAD, BANNER)
        elif command == b"OPEN":
            stream = Stream(self, len(self.streams) + 1, remote)
            self.streams[stream.local] = stream
            self.send(b"OKAY", stream.local, remote)
            service = payload.rstrip(b"\0").decode()
            threading.Thread(target=self.serve, args=(stream, service), daemon=True).start()
        elif command == b"WRTE":
            self.streams[local].inbox.put(payload)
            self.send(b"OKAY", local, remote)
        elif command == b"OKAY":
            self.streams[local].may_send.release()
        elif command == b"CLSE" and local in self.streams:
            self.streams[local].inbox.put(None)

    def serve(self, stream: Stream, service: str) -> None:
        name, _, command = service.partition(":")
        try:
            if name == "sync":
                Sync(self.server, stream).serve()
            elif name.startswith("shell"):
                shell(self.server, stream, command, second_version="v2" in name.split(","))
        except (EOFError, ConnectionError):
            pass
        finally:
            self.send(b"CLSE", stream.local, stream.remote)


def shell(device: Device, stream: Stream, command: str, *, second_version: bool) -> None:
    """Runs a command on this machine, its /data/local/tmp in the device's folder."""
    text = command.replace(f"/{TMP}", str(device.path(TMP)))
    if text.startswith("getprop "):
        stream.write(packet(STDOUT, f"{device.properties[text.split()[1]]}\n", second_version))
        stream.write(packet(EXIT, b"\0", second_version))
        return
    process = subprocess.Popen(
        ["sh", "-c", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if second_version else subprocess.STDOUT,
    )

    def forward(pipe: IO[bytes], kind: int) -> None:
        while data := os.read(pipe.fileno(), MAX_PAYLOAD - SHELL_HEADER.size):
            stream.write(packet(kind, data, second_version))

    pipes = ((process.stdout, STDOUT), (process.stderr, STDERR))
    threads = [threading.Thread(target=forward, args=pair) for pair in pipes if pair[0]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.write(packet(EXIT, bytes([process.wait() & 0xFF]), second_version))


def packet(kind: int, data: bytes | str, second_version: bool) -> bytes:
    """Output of a shell as its version sends it; version 1 has no exit codes."""
    payload = data.encode() if isinstance(data, str) else data
    if second_version:
        return SHELL_HEADER.pack(kind, len(payload)) + payload
    return b"" if kind == EXIT else payload


class Sync:
    """The file service of a stream."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self.stream = device, stream

    def serve(self) -> None:
        requests = {b"STAT": self.stat, b"SEND": self.take, b"RECV": self.give}
        while True:
            name, length = SYNC_HEADER.unpack(self.stream.read(SYNC_HEADER.size))
            if name == b"QUIT":
                return
            argument = self.stream.read(length).decode()
            try:
                requests[name](argument)
            except OSError as error:
                message = str(error).encode()
                self.stream.write(SYNC_HEADER.pack(b"FAIL", len(message)) + message)

    def stat(self, remote: str) -> None:
        path = self.device.path(remote)
        found = path.stat() if path.exists() else None
        numbers = (found.st_mode, found.st_size, int(found.st_mtime)) if found else (0, 0, 0)
        self.stream.write(struct.pack("<4s3I", b"STAT", *numbers))

    def take(self, argument: str) -> None:
        remote, _, mode = argument.rpartition(",")
        path = self.device.path(remote)
        content = b""
        while True:
            name, length = SYNC_HEADER.unpack(self.stream.read(SYNC_HEADER.size))
            if name == b"DONE":  # the number is a time, not a length
                break
            content += self.stream.read(length)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(int(mode) & 0o777)
        if (content[:4], content[18:20]) == ELF_AARCH64:
            self.emulate(path)
        self.stream.write(SYNC_HEADER.pack(b"OKAY", 0))

    def emulate(self, path: Path) -> None:
        """Puts a script in the place of an executable, which runs it through the runner."""
        executable = path.with_name(f"{path.name}.aarch64")
        path.rename(executable)
        path.write_text(f'#!/bin/sh\nexec {self.device.runner} "{executable}" "$@"\n')
        path.chmod(0o755)

    def give(self, remote: str) -> None:
        content = self.device.path(remote).read_bytes()
        for start in range(0, len(content), 1 << 16):
            part = content[start:][: 1 << 16]
            self.stream.write(SYNC_HEADER.pack(b"DATA", len(part)) + part)
        self.stream.write(SYNC_HEADER.pack(b"DONE", 0))


def main() -> None:
    """Serves a device until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--runner", default=f"{shutil.which('qemu-aarch64')} -cpu max")
    parser.add_argument("--abis", default="arm64-v8a,armeabi-v7a")
    parser.add_argument("--model", default="Emulated 8")
    args = parser.parse_args()
    properties = {"ro.product.cpu.abilist": args.abis, "ro.product.model": args.model}
    with Device(args.root, args.runner, properties) as device:
        print(device.server_address[1], flush=True)
        device.serve_forever()


if __name__ == "__main__":
    main()
