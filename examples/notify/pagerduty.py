#!/usr/bin/env python3
"""Open an incident of PagerDuty for a document of ckptctl.

ckptctl watch --notify examples/notify/pagerduty.py …

PAGERDUTY_ROUTING_KEY is the key of an Events API v2 integration, and a secret. A root or a step
has one incident, however often it is reported: its address is the deduplication key. The attempts
that `ckptctl run` reports have no address, and share one incident.
Source: https://developer.pagerduty.com/docs/send-alert-event
"""

import json
import os
import sys
import urllib.request

ADDRESS = os.environ.get("PAGERDUTY_URL", "https://events.pagerduty.com/v2/enqueue")

document = json.load(sys.stdin)
told = document.get("attempt") or document
where = told.get("url") or told.get("root") or told.get("runbook") or "ckptctl run"
said = told.get("message") or told.get("reason") or f"exit code {document['exit_code']}"
event = {
    "routing_key": os.environ["PAGERDUTY_ROUTING_KEY"],
    "event_action": "trigger",
    "dedup_key": f"ckptctl:{where}"[:255],
    "payload": {
        "summary": f"{where}: {said}"[:1024],
        "source": where,
        # A job that was restarted needs nobody at night.
        "severity": "warning" if "attempt" in document else "critical",
        "custom_details": document,
    },
}
request = urllib.request.Request(
    ADDRESS, json.dumps(event).encode(), {"Content-Type": "application/json"}
)
urllib.request.urlopen(request, timeout=10)
