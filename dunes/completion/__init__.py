"""Line completion: engine, index, copies, gate, simulated typing and the thresholds fitted by it.

Start with `completer.find_completer`, `completer.FolderCompleter` and `search.CompleteOptions`; any
`protocol.LineCompleter` can be scored and served.
"""
