"""Wires the rooms: what code and the command line call. This room alone knows the order of the stages.

Importing it loads no framework and no stage; each function imports what it needs when it is called.
"""

from whence.api.capturing import attach, capture
from whence.api.doctoring import doctor, doctor_command
from whence.api.faults import fault_sites, planted
from whence.api.generated import first_difference, tokens
from whence.api.labelling import attach_labels, include, label, new_id, task
from whence.api.labels import record, recording
from whence.api.laddering import ladder, ladder_command
from whence.api.patching import locate
from whence.api.results import compare, face, free_output, load_comparison, load_policy, views
from whence.api.runs import open_run, open_to_show, recover, run_command, scrub, warmup
from whence.api.sided import compare_labels, run_labels

__all__ = [
    "attach", "attach_labels", "capture", "compare", "compare_labels", "doctor", "doctor_command", "face", "fault_sites",
    "first_difference", "free_output", "include", "label", "ladder", "ladder_command", "load_comparison", "load_policy", "locate", "new_id",
    "open_run", "open_to_show", "planted", "record", "recording", "recover", "run_command", "run_labels", "scrub", "task", "tokens",
    "views", "warmup",
]  # fmt: skip
