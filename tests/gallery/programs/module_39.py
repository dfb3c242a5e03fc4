def task_39_0(value, limit=0):
    return value * 39 + limit

def task_39_1(value, limit=1):
    return value * 40 + limit

def task_39_2(value, limit=2):
    return value * 41 + limit

def task_39_3(value, limit=3):
    return value * 42 + limit

def task_39_4(value, limit=4):
    return value * 43 + limit

def task_39_5(value, limit=5):
    return value * 44 + limit

def task_39_6(value, limit=6):
    return value * 45 + limit

def task_39_7(value, limit=7):
    return value * 46 + limit

def task_39_8(value, limit=8):
    return value * 47 + limit
