#!/usr/bin/env python3
"""Send a document of ckptctl to Slack.

ckptctl run --notify examples/notify/slack.py …

SLACK_WEBHOOK_URL is the address of an incoming webhook, and a secret.
Source: https://api.slack.com/messaging/webhooks
"""

import json
import os
import sys
import urllib.request


def text_of(document: dict) -> str:
    """One line for a person: what happened, where, and what to run next."""
    told = document.get("attempt") or document
    where = told.get("url") or told.get("root") or told.get("runbook") or "ckptctl run"
    said = told.get("message") or told.get("reason") or f"exit code {document['exit_code']}"
    following = document.get("next_command")
    return f"*{where}*: {said}" + (f"\n`{following}`" if following else "")


body = json.dumps({"text": text_of(json.load(sys.stdin))}).encode()
request = urllib.request.Request(
    os.environ["SLACK_WEBHOOK_URL"], body, {"Content-Type": "application/json"}
)
urllib.request.urlopen(request, timeout=10)
