"""Runs the cells that come as JSON on standard input, one a line, in a Jupyter kernel, and answers each with a line.

Answers are lists: while a cell runs ["stdout", TEXT], ["stderr", TEXT], ["display", [MIME, ...], TEXT] and
["error", TEXT], and at its end ["done"]. The line "interrupt" interrupts the cell.
"""

import json
import sys
import threading

from jupyter_client.manager import KernelManager


def say(*answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def answers(client):
    """Passes on what the kernel publishes, until the end of the input."""
    while True:
        message = client.get_iopub_msg(timeout=None)
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            say(content["name"], content["text"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            data = content["data"]
            say("display", sorted(data), data.get("text/html") or data.get("text/plain") or "")
        elif kind == "error":
            say("error", "\n".join([content["evalue"], *content["traceback"]]))
        elif kind == "status" and content["execution_state"] == "idle":
            if message["parent_header"].get("msg_type") == "execute_request":
                reply = client.get_shell_msg(timeout=None)["content"]
                if reply["status"] != "ok":
                    say("error", str(reply.get("evalue", reply["status"])))
                say("done")


def main():
    folder, name = sys.argv[1:]
    manager = KernelManager(kernel_name=name)
    # Standard output is for answers alone.
    manager.start_kernel(cwd=folder, stdout=sys.stderr)
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        threading.Thread(target=answers, args=(client,), daemon=True).start()
        say("ready")
        for line in sys.stdin:
            if line.strip() == "interrupt":
                manager.interrupt_kernel()
            else:
                client.execute(json.loads(line), allow_stdin=False)
    finally:
        manager.shutdown_kernel(now=True)


main()
