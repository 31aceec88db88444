"""An Android device for tests, which the real adb client connects to over loopback.

    python tests/emulated_device.py --root FOLDER --runner "qemu-aarch64 -cpu max"

Implements the device's side of adb's protocol (protocol.txt and SYNC.TXT in Android's sources):
connection, shell version 2, and sync (stat, push, pull). Its /data/local/tmp is below FOLDER, and
pushed ARM executables run through the runner. Prints its port and serves until killed.
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

VERSION = 0x01000001  # without checksums
MAX_PAYLOAD = 256 * 1024
# Without stat_v2 and sendrecv_v2, adb makes the simplest requests.
BANNER = b"device::ro.product.name=emulated;ro.product.model=Emulated;features=shell_v2,cmd"
TMP = "data/local/tmp"
ELF_AARCH64 = (b"\x7fELF", b"\xb7\x00")  # the magic, and e_machine at byte 18
HEADER = struct.Struct("<4s5I")  # command, two arguments, length, checksum, magic
SYNC_HEADER = struct.Struct("<4sI")
SHELL_HEADER = struct.Struct("<BI")
STDOUT, STDERR, EXIT = 1, 2, 3  # kinds of shell packets


class Stream:
    """A stream of a shared connection; one packet is in flight at a time."""

    def __init__(self, connection: "Connection", local: int, remote: int) -> None:
        self.connection, self.local, self.remote = connection, local, remote
        self.inbox: queue.Queue[bytes | None] = queue.Queue()
        self.may_send = threading.Semaphore(1)
        self.buffer = b""

    def read(self, count: int) -> bytes:
        """Return the next ``count`` bytes; raise EOFError if the client closes the stream."""
        while len(self.buffer) < count:
            payload = self.inbox.get()
            if payload is None:
                raise EOFError
            self.buffer += payload
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data

    def write(self, data: bytes) -> None:
        """Send data in packets, each after the one before is acknowledged."""
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
        """Return the file of this machine that stands for a path of the device."""
        return self.root / remote.lstrip("/")


class Connection(socketserver.StreamRequestHandler):
    """The connection of one adb server."""

    server: Device

    def setup(self) -> None:
        super().setup()
        self.sending = threading.Lock()
        self.streams: dict[int, Stream] = {}

    def send(self, command: bytes, first: int, second: int, payload: bytes = b"") -> None:
        magic = int.from_bytes(command, "little") ^ 0xFFFFFFFF
        header = HEADER.pack(command, first, second, len(payload), 0, magic)
        with self.sending:
            self.request.sendall(header + payload)

    def handle(self) -> None:
        try:
            while header := self.rfile.read(HEADER.size):
                command, first, second, length, _, _ = HEADER.unpack(header)
                self.answer(command, first, second, self.rfile.read(length))
        except (struct.error, ConnectionError):
            pass
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
            elif name.startswith("shell,v2"):
                shell(self.server, stream, command)
        except (EOFError, ConnectionError):
            pass
        finally:
            self.send(b"CLSE", stream.local, stream.remote)


def shell(device: Device, stream: Stream, command: str) -> None:
    """Run a command on this machine, with the device's /data/local/tmp."""

    def write(kind: int, data: bytes) -> None:
        stream.write(SHELL_HEADER.pack(kind, len(data)) + data)

    def forward(pipe: IO[bytes], kind: int) -> None:
        while data := os.read(pipe.fileno(), MAX_PAYLOAD - SHELL_HEADER.size):
            write(kind, data)

    if command.startswith("getprop "):
        command = f"echo '{device.properties[command.split()[1]]}'"
    command = command.replace(f"/{TMP}", str(device.path(TMP)))
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(["sh", "-c", command], **streams)  # type: ignore[call-overload]
    pipes = ((process.stdout, STDOUT), (process.stderr, STDERR))
    threads = [threading.Thread(target=forward, args=pair) for pair in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    write(EXIT, bytes([process.wait() & 0xFF]))


class Sync:
    """The file service of a stream."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self.stream = device, stream

    def serve(self) -> None:
        requests = {b"STAT": self.stat, b"SEND": self.receive, b"RECV": self.send}
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

    def receive(self, argument: str) -> None:
        remote, _, mode = argument.rpartition(",")
        path, content = self.device.path(remote), b""
        while True:
            name, length = SYNC_HEADER.unpack(self.stream.read(SYNC_HEADER.size))
            if name == b"DONE":  # the number is a time, not a length
                break
            content += self.stream.read(length)
        path.parent.mkdir(parents=True, exist_ok=True)
        if (content[:4], content[18:20]) == ELF_AARCH64:  # a script runs it with the runner
            executable = path.with_name(f"{path.name}.aarch64")
            executable.write_bytes(content)
            executable.chmod(0o755)
            content = f'#!/bin/sh\nexec {self.device.runner} "{executable}" "$@"\n'.encode()
        path.write_bytes(content)
        path.chmod(int(mode) & 0o777)
        self.stream.write(SYNC_HEADER.pack(b"OKAY", 0))

    def send(self, remote: str) -> None:
        content = self.device.path(remote).read_bytes()
        for start in range(0, len(content), 1 << 16):
            part = content[start:][: 1 << 16]
            self.stream.write(SYNC_HEADER.pack(b"DATA", len(part)) + part)
        self.stream.write(SYNC_HEADER.pack(b"DONE", 0))


def main() -> None:
    """Serve a device until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--runner", default=f"{shutil.which('qemu-aarch64')} -cpu max")
    args = parser.parse_args()
    properties = {
        "ro.product.cpu.abilist": "arm64-v8a,armeabi-v7a",
        "ro.product.model": "Emulated 8",
    }
    with Device(args.root, args.runner, properties) as device:
        print(device.server_address[1], flush=True)
        device.serve_forever()


if __name__ == "__main__":
    main()
